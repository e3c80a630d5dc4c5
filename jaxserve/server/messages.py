"""Chat messages: their schema, and the plain dicts that chat templates work on.

Templates know little of the API's freedom, so that its forms are brought to one: content is always a string, a
developer is a system, and a tool call's arguments are an object instead of a JSON text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from jaxserve.errors import RequestError
from jaxserve.server.forms import Strict, as_parts
from jaxserve.server.jsonio import parse_json

__all__ = ["Message", "render"]


class TextPart(Strict):
    """A part of a message's content; only text is supported."""

    type: Literal["text"]
    text: str


class FunctionCall(Strict):
    """Which function, and its arguments as JSON text; OpenAI's client sends back what it made of them as well."""

    name: str
    arguments: str
    parsed_arguments: Any = None


class ToolCall(Strict):
    """A call that an earlier answer made; it has its index where a client put it together from a stream."""

    id: str | None = None
    index: int | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Strict):
    """One message. The fields that must be null are those which clients send back as they got them; ``parsed`` is what
    OpenAI's client made of the content."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[TextPart], BeforeValidator(as_parts)] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    parsed: Any = None
    annotations: list[None] | None = None
    audio: None = None
    function_call: None = None
    refusal: None = None


def render(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as chat templates expect them. RequestError: one lacks content, or a call's arguments are bad."""
    return [_render(message, f"messages.{index}") for index, message in enumerate(messages)]


def _render(message: Message, where: str) -> dict[str, Any]:
    if message.content is None and message.role != "assistant":
        raise RequestError(f"{where}.content must not be null for the role {message.role}.", f"{where}.content")
    rendered: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": "\n".join(part.text for part in message.content or ()),
    }
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            rendered[name] = value
    # One thing under two names: what vLLM calls it now, and what templates do.
    thought = message.reasoning if message.reasoning_content is None else message.reasoning_content
    if thought is not None:
        rendered["reasoning_content"] = thought
    if message.tool_calls:
        if message.role != "assistant":
            raise RequestError(f"{where}.tool_calls is for the role assistant only.", f"{where}.tool_calls")
        calls = enumerate(message.tool_calls)
        rendered["tool_calls"] = [_render_call(call, f"{where}.tool_calls.{index}") for index, call in calls]
    return rendered


def _render_call(call: ToolCall, where: str) -> dict[str, Any]:
    param = f"{where}.function.arguments"
    try:
        arguments = parse_json(call.function.arguments.encode()) if call.function.arguments else {}
    except RequestError:
        raise RequestError(f"{param} must be valid JSON that does not nest too deeply.", param) from None
    if not isinstance(arguments, dict):
        raise RequestError(f"{param} must be a JSON object.", param)
    rendered = {"type": call.type, "function": {"name": call.function.name, "arguments": arguments}}
    return rendered if call.id is None else {"id": call.id, **rendered}
