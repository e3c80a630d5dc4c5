"""Which format a model writes its calls in, by name or by what its chat template says."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.server.parsers.calls import leading, llama3_json, marked, mistral
from jaxserve.server.parsers.pythonic import pythonic
from jaxserve.server.parsers.source import ParseCalls
from jaxserve.server.parsers.xml import qwen3_xml

__all__ = ["TOOL_PARSERS", "ToolParser", "detect"]


@dataclass(frozen=True)
class ToolParser:
    """One format of calls.

    Attributes:
        parse: takes an answer apart.
        marks: texts by which the format is known; a tokenizer may have them as special tokens.
        id_length: characters of a call's id, where the model's template insists on their number.
    """

    parse: ParseCalls
    marks: tuple[str, ...] = ()
    id_length: int | None = None


_XML = ToolParser(qwen3_xml, ("<tool_call>", "</tool_call>", "<function="))

TOOL_PARSERS: dict[str, ToolParser] = {
    "granite": ToolParser(marked(("<|tool_call|>", "<tool_call>"), "</tool_call>"), ("<|tool_call|>", "<tool_call>")),
    "hermes": ToolParser(marked(("<tool_call>",), "</tool_call>"), ("<tool_call>", "</tool_call>")),
    "json": ToolParser(leading),
    "llama3_json": ToolParser(llama3_json, ("<|python_tag|>", "<|eom_id|>")),
    "mistral": ToolParser(mistral, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), id_length=9),
    "pythonic": ToolParser(pythonic, ("<|python_start|>", "<|python_end|>")),
    "qwen3_coder": _XML,
    "qwen3_xml": _XML,
}

_SIGNS = (
    ("[TOOL_CALLS]", "mistral"),
    ("<function=", "qwen3_xml"),
    ("<|tool_call|>", "granite"),
    ("<tool_call>", "hermes"),
    ("<|python_start|>", "pythonic"),
    ("[func_name1(", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": dictionary of argument', "llama3_json"),
)


def detect(chat_template: str | None) -> str | None:
    """The name of the format that a chat template teaches, None if it is none of those known."""
    return next((name for sign, name in _SIGNS if sign in (chat_template or "")), None)
