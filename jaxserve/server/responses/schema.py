"""The body of ``POST /v1/responses``, and the chat request that it stands for.

Sampling parameters that OpenAI does not have here are taken under the names of the other endpoints.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from jaxserve.errors import RequestError
from jaxserve.sampling_params import MAX_LOGPROBS
from jaxserve.server.compatibility import CHAT_UNSUPPORTED
from jaxserve.server.exchange import named_as
from jaxserve.server.forms import Strict
from jaxserve.server.responses.items import Input, Item, as_messages
from jaxserve.server.schema import ChatRequest, GenerationRequest
from jaxserve.server.tools import Function

__all__ = ["CHAT_NAMES", "ResponsesRequest"]

LOGPROBS = "message.output_text.logprobs"

CHAT_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
}
"""What parameters of chats are called here."""

_REFUSED = {
    "include_metrics": "ask for it in a chat",
    "max_tokens": "it is called max_output_tokens here",
    "n": "a response has one answer",
    "prompt_logprobs": "ask for it in a chat",
    "request_id": "a response has an id of the server's",
    "response_format": "it is called text.format here",
    "return_token_ids": "ask for it in a chat",
    "return_tokens_as_token_ids": "ask for it in a chat",
}


class _Format(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if (self.type == "json_schema") != (self.schema_ is not None and self.name is not None):
            raise ValueError("needs a name and a schema for the type json_schema, and takes none for others")
        return self

    def of_chat(self) -> dict[str, Any]:
        """As chats have it."""
        if self.type != "json_schema":
            return {"type": self.type}
        schema = {"name": self.name, "description": self.description, "schema": self.schema_, "strict": self.strict}
        return {"type": self.type, "json_schema": {key: value for key, value in schema.items() if value is not None}}


class _TextSettings(Strict):
    format: _Format | None = None
    verbosity: Literal["medium"] | None = None


class _Reasoning(Strict):
    """How to think; a model that thinks does so as it was trained to."""

    effort: None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class ResponseTool(Function):
    """A function that may be called; the only kind of tools."""

    type: Literal["function"]

    def of_chat(self) -> dict[str, Any]:
        """As chats have it."""
        return {"type": "function", "function": self.model_dump(exclude={"type"}, exclude_none=True)}


def _function(value: Any) -> Any:
    if isinstance(value, dict) and value.get("type") != "function":
        raise ValueError(f'must be of the type "function", got {reprlib.repr(value.get("type"))}')
    return value


def _choice(value: Any) -> Any:
    match value:
        case None | "auto" | "none" | "required":
            return value
        case {"type": "function", "name": str()} if len(value) == 2:
            return value
    raise ValueError('must be "none", "auto", "required", or {"type": "function", "name": "..."}')


class ResponsesRequest(GenerationRequest):
    """Body of ``POST /v1/responses``."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **CHAT_UNSUPPORTED,
        "context_management": (),
        "conversation": (),
        "max_tool_calls": (),
        "moderation": (),
        "prompt": (),
        "truncation": ("disabled",),
    }

    input: Input = Field(min_length=1)
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    text: _TextSettings | None = None
    reasoning: _Reasoning | None = None
    tools: list[Annotated[ResponseTool, BeforeValidator(_function)]] | None = None
    tool_choice: Annotated[Any, BeforeValidator(_choice)] = None
    parallel_tool_calls: bool | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    chat_template_kwargs: dict[str, Any] | None = None
    background: bool | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None

    @classmethod
    def parse(cls, body: Mapping[str, Any], *, strict: bool = False) -> Self:
        for name, hint in _REFUSED.items():
            value = body.get(name)
            # By identity: 0 and False are equal, and "max_tokens": 0 must not pass.
            if value is not None and not (value == 1 if name == "n" else value is False):
                raise RequestError(f"{name} is not supported: {hint}.", name)
        request = super().parse(body, strict=strict)
        if request.background and request.store is False:
            raise RequestError("background needs a response that is stored (store: true).", "background")
        if request.top_logprobs and not request.wants_logprobs:
            raise RequestError(f"top_logprobs can only be given together with include: [{LOGPROBS!r}].", "top_logprobs")
        if (options := request.stream_options) and (options.include_usage or options.continuous_usage_stats):
            raise RequestError("stream_options: a response tells its usage at its end.", "stream_options")
        return request

    @property
    def wants_logprobs(self) -> bool:
        """Whether log probabilities come with the text."""
        return LOGPROBS in (self.include or ())

    def chat(self, conversation: Iterable[Item]) -> ChatRequest:
        """The chat that this asks for, about a conversation. RequestError: it cannot be one."""
        shared = GenerationRequest.model_fields.keys() - {"stream", "stream_options", *_REFUSED}
        body = self.model_dump(include=set(shared), exclude_none=True)
        body["messages"] = as_messages(conversation)
        if self.instructions is not None:
            body["messages"].insert(0, {"role": "system", "content": self.instructions})
        if self.text is not None and self.text.format is not None:
            body["response_format"] = self.text.format.of_chat()
        if self.tools:
            body["tools"] = [tool.of_chat() for tool in self.tools]
        choice = self.tool_choice
        body["tool_choice"] = (
            {"type": "function", "function": {"name": choice["name"]}} if isinstance(choice, dict) else choice
        )
        body |= {
            "max_completion_tokens": self.max_output_tokens,
            "parallel_tool_calls": self.parallel_tool_calls,
            "chat_template_kwargs": self.chat_template_kwargs,
            "logprobs": self.wants_logprobs,
            "top_logprobs": self.top_logprobs if self.wants_logprobs else None,
        }
        with named_as(CHAT_NAMES):
            return ChatRequest.parse(body)
