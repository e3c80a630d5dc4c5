"""Items: what a conversation of the responses API consists of, and the chat messages that they stand for.

Where a chat has one message of an assistant with thoughts, text and calls, a response has an item for each; items of an
assistant that follow each other become one message again. Fields without a meaning here are those that clients send
back as they got them.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter

from jaxserve.errors import RequestError
from jaxserve.server.forms import Strict, as_parts
from jaxserve.server.jsonio import parse_json

__all__ = ["Input", "Item", "as_json", "as_messages", "from_json"]


class _Text(Strict):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Any = None


class _Refusal(Strict):
    type: Literal["refusal"]
    refusal: str


class _Thought(Strict):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class _Part(Strict):
    """What all items have."""

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


_Content = Annotated[list[Annotated[_Text | _Refusal, Field(discriminator="type")]], BeforeValidator(as_parts)]


class MessageItem(_Part):
    """Text of anybody."""

    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: _Content
    phase: str | None = None


def _arguments(text: str) -> str:
    try:
        legal = not text or isinstance(parse_json(text.encode()), dict)
    except RequestError:
        legal = False
    if not legal:
        raise ValueError("must be the text of a JSON object")
    return text


class CallItem(_Part):
    """A call that an assistant made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: Annotated[str, AfterValidator(_arguments)]
    parsed_arguments: Any = None
    namespace: None = None
    caller: None = None


class ResultItem(_Part):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: _Content


class ReasoningItem(_Part):
    """What an assistant thought."""

    type: Literal["reasoning"]
    summary: list[_Thought] = Field(default_factory=list)
    content: list[_Thought] | None = None
    encrypted_content: None = None


Item = Annotated[MessageItem | CallItem | ResultItem | ReasoningItem, Field(discriminator="type")]

_ENDS = {
    "reasoning_content": ("reasoning_content", "content", "tool_calls"),
    "content": ("content", "tool_calls"),
    "tool_calls": (),
}
"""Thoughts come first, then text, then calls: after which of them a part begins another message."""

_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])
_ARRAYS: TypeAdapter[list[list[Item]]] = TypeAdapter(list[list[Item]])


def _listed(value: Any) -> Any:
    """A text is a message of the user, and an item with a role but without a type is a message."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of items")
    return [{"type": "message", **item} if isinstance(item, dict) and "role" in item else item for item in value]


Input = Annotated[list[Item], BeforeValidator(_listed)]


def as_json(items: Iterable[Item]) -> bytes:
    """Items as a JSON array, in which each has an id."""
    named = [item if item.id else item.model_copy(update={"id": f"item_{uuid.uuid4().hex}"}) for item in items]
    return _ITEMS.dump_json(named, exclude_none=True)


def from_json(arrays: bytes) -> list[Item]:
    """The items of a JSON array of such arrays, one after the other."""
    return [item for items in _ARRAYS.validate_json(arrays) for item in items]


def as_messages(items: Iterable[Item]) -> list[dict[str, Any]]:
    """The chat messages of a conversation."""
    messages: list[dict[str, Any]] = []
    spoken: dict[str, Any] | None = None  # the assistant's message in the making
    for item in items:
        match item:
            case ResultItem():
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
                spoken = None
                continue
            case MessageItem(role="user" | "system" | "developer"):
                messages.append({"role": item.role, "content": _text(item.content)})
                spoken = None
                continue
            case MessageItem():
                key, value = "content", _text(item.content)
            case ReasoningItem():
                key, value = "reasoning_content", "\n".join(part.text for part in item.content or item.summary)
            case CallItem():
                key, value = "tool_calls", ""
        if spoken is None or not spoken.keys().isdisjoint(_ENDS[key]):
            spoken = {"role": "assistant"}
            messages.append(spoken)
        if isinstance(item, CallItem):
            function = {"name": item.name, "arguments": item.arguments}
            spoken.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
        else:
            spoken[key] = value
    return messages


def _text(parts: Sequence[_Text | _Refusal]) -> str:
    return "\n".join(part.text if isinstance(part, _Text) else part.refusal for part in parts)
