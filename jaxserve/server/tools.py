"""Tools of a chat request: their schema, and how a model is told of them whose chat template knows none."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from jaxserve.server.forms import Strict

__all__ = ["Tool", "ToolChoice", "choice_of", "with_tools"]

_NAME = r"^[a-zA-Z0-9_.-]{1,64}$"


class Function(Strict):
    """A function that may be called; ``parameters`` is a JSON schema, by default of an empty object."""

    name: str = Field(pattern=_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        return self.parameters or {"type": "object", "properties": {}, "additionalProperties": False}


class Tool(Strict):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function

    def rendered(self) -> dict[str, Any]:
        """As chat templates expect it."""
        return self.model_dump(exclude_none=True)


def choice_of(value: Any) -> Any:
    """``auto``, ``none``, ``required``, or from OpenAI's object the name of the function that must be called."""
    match value:
        case None | "auto" | "none" | "required":
            return value
        case {"type": "function", "function": {"name": str(name)}} if len(value) == 2 and len(value["function"]) == 1:
            return {"name": name}
    raise ValueError('must be "none", "auto", "required", or {"type": "function", "function": {"name": "..."}}')


ToolChoice = Annotated[Any, BeforeValidator(choice_of)]


def with_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The messages with a system message that describes tools, in the form in which ``hermes`` finds the calls."""
    lines = "\n".join(json.dumps(tool.rendered()["function"], ensure_ascii=False) for tool in tools)
    text = (
        "You may call functions to answer. Each is described by one line of JSON:\n"
        f"<tools>\n{lines}\n</tools>\n"
        "To call one, write its name and its arguments as JSON, and nothing else:\n"
        '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'
    )
    first = messages[0] if messages else {}
    if first.get("role") != "system":
        return [{"role": "system", "content": text}, *map(dict, messages)]
    return [{**first, "content": f"{first['content']}\n\n{text}"}, *map(dict, messages[1:])]
