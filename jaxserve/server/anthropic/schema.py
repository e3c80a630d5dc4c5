"""Bodies of Anthropic's messages, and the chat that they stand for.

A user's message may hold results of tools, which are messages of their own in a chat. ``cache_control`` has no effect:
whatever two prompts begin with is cached anyway.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field

from jaxserve.errors import RequestError
from jaxserve.server.exchange import named_as
from jaxserve.server.forms import Strict, as_parts
from jaxserve.server.schema import Body, ChatRequest

__all__ = ["CHAT_NAMES", "CountRequest", "MessagesRequest"]

CHAT_NAMES = {
    "max_completion_tokens": "max_tokens",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "include_reasoning": "thinking",
}
"""What parameters of chats are called here."""


class _Cached(Strict):
    cache_control: Any = None


class _Text(_Cached):
    type: Literal["text"]
    text: str
    citations: list[None] | None = None


class _Thinking(Strict):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class _ToolUse(_Cached):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: Any = None


_Texts = Annotated[list[_Text], BeforeValidator(as_parts)]


class _ToolResult(_Cached):
    """What a call gave; an error is told to the model by the word before its text."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: _Texts | None = None
    is_error: bool | None = None

    def text(self) -> str:
        return ("Error: " if self.is_error else "") + _joined(self.content or ())


_Part = Annotated[_Text | _Thinking | _ToolUse | _ToolResult, Field(discriminator="type")]


class _Message(Strict):
    role: Literal["user", "assistant"]
    content: Annotated[list[_Part], BeforeValidator(as_parts)]

    def of_chat(self) -> Iterator[dict[str, Any]]:
        """The messages that a chat has for it."""
        results = [part for part in self.content if isinstance(part, _ToolResult)]
        texts = [part for part in self.content if isinstance(part, _Text)]
        calls = [part for part in self.content if isinstance(part, _ToolUse)]
        thoughts = [part.thinking for part in self.content if isinstance(part, _Thinking)]
        if self.role == "user":
            if calls or thoughts:
                raise RequestError("messages: tool_use and thinking are for the role assistant only.", "messages")
            for result in results:
                yield {"role": "tool", "tool_call_id": result.tool_use_id, "content": result.text()}
            if texts or not results:
                yield {"role": "user", "content": _joined(texts)}
            return
        if results:
            raise RequestError("messages: tool_result is for the role user only.", "messages")
        message: dict[str, Any] = {"role": "assistant", "content": _joined(texts)}
        if thoughts:
            message["reasoning_content"] = "\n".join(thoughts)
        if calls:
            message["tool_calls"] = [
                {"id": call.id, "function": {"name": call.name, "arguments": json.dumps(call.input)}} for call in calls
            ]
        yield message


class _Tool(_Cached):
    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    eager_input_streaming: bool | None = None  # arguments are streamed as they are written, always

    def of_chat(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "strict": self.strict}
        known = {key: value for key, value in function.items() if value is not None}
        return {"type": "function", "function": {**known, "parameters": self.input_schema}}


class _ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def of_chat(self) -> Any:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name or ""}}
        return {"any": "required"}.get(self.type, self.type)


class _ThinkingSettings(Strict):
    """How long a model thinks is up to the model, within ``max_tokens``."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1024)
    display: Literal["summarized", "omitted"] | None = None


class _JsonFormat(Strict):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class _OutputConfig(Strict):
    format: _JsonFormat | None = None
    effort: None = None


class CountRequest(Body):
    """Body of ``POST /v1/messages/count_tokens``."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "container": (),
        "context_management": (),
        "mcp_servers": ([],),
        "speed": ("standard",),
    }

    model: str | None = None
    messages: list[_Message] = Field(min_length=1)
    system: _Texts | None = None
    tools: list[_Tool] | None = None
    tool_choice: _ToolChoice | None = None
    thinking: _ThinkingSettings | None = None
    output_config: _OutputConfig | None = None
    cache_control: Any = None

    @classmethod
    def parse(cls, body: Mapping[str, Any], *, strict: bool = False) -> Self:
        request = super().parse(body, strict=strict)
        if request.thinking is not None and request.thinking.budget_tokens is not None:
            request._ignored = (*request._ignored, "thinking.budget_tokens")
        return request

    @property
    def shows_thoughts(self) -> bool:
        """Whether the answer holds what was thought."""
        thinking = self.thinking
        return thinking is None or not (thinking.type == "disabled" or thinking.display == "omitted")

    def chat(self, template: str | None) -> ChatRequest:
        """The chat that this asks for, of a model with a chat template. RequestError: it cannot be one."""
        messages = [rendered for message in self.messages for rendered in message.of_chat()]
        # An answer whose beginning is given goes on from there.
        prefilled = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
        if self.system:
            messages.insert(0, {"role": "system", "content": _joined(self.system)})
        choice = self.tool_choice or _ToolChoice(type="auto")
        body: dict[str, Any] = {
            "messages": messages,
            "continue_final_message": prefilled,
            "tools": [tool.of_chat() for tool in self.tools] if self.tools else None,
            "tool_choice": choice.of_chat(),
            "parallel_tool_calls": False if choice.disable_parallel_tool_use else None,
            "include_reasoning": self.shows_thoughts,
        }
        if self.thinking is not None and "enable_thinking" in (template or ""):
            body["chat_template_kwargs"] = {"enable_thinking": self.thinking.type != "disabled"}
        if self.output_config is not None and (form := self.output_config.format) is not None:
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "output", "schema": form.schema_}}
        with named_as(CHAT_NAMES):
            return ChatRequest.parse({**body, **self.sampling()})

    def sampling(self) -> dict[str, Any]:
        """Parameters of the chat that say how its answer is sampled."""
        return {}


class MessagesRequest(CountRequest):
    """Body of ``POST /v1/messages``."""

    max_tokens: int = Field(ge=1)
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None

    def sampling(self) -> dict[str, Any]:
        return {
            "max_completion_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
        }


def _joined(parts: Sequence[_Text]) -> str:
    return "\n".join(part.text for part in parts)
