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
        strict: what stands before a call's name, between that and its arguments, and behind them, where the format can
            be held to their schema; its mark comes first. None where it cannot.
        id_length: characters of a call's id, where the model's template insists on their number.
    """

    parse: ParseCalls
    marks: tuple[str, ...] = ()
    id_length: int | None = None
    strict: tuple[str, str, str] | None = None

    def tag(self, name: str) -> tuple[str, str]:
        """What stands before and behind the arguments of a call. Only where the format can be ``strict``."""
        assert self.strict is not None, "asked before"
        before, between, behind = self.strict
        return f"{before}{name}{between}", behind


_BETWEEN = '", "arguments": '
_XML = ToolParser(qwen3_xml, ("<tool_call>", "</tool_call>", "<function="))

TOOL_PARSERS: dict[str, ToolParser] = {
    "granite": ToolParser(
        marked(("<|tool_call|>", "<tool_call>"), "</tool_call>"),
        ("<|tool_call|>", "<tool_call>"),
        strict=('<|tool_call|>[{"name": "', _BETWEEN, "}]"),
    ),
    "hermes": ToolParser(
        marked(("<tool_call>",), "</tool_call>"),
        ("<tool_call>", "</tool_call>"),
        strict=('<tool_call>\n{"name": "', _BETWEEN, "}\n</tool_call>"),
    ),
    "json": ToolParser(leading),
    "llama3_json": ToolParser(llama3_json, ("<|python_tag|>", "<|eom_id|>")),
    "mistral": ToolParser(
        mistral, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), 9, ('[TOOL_CALLS][{"name": "', _BETWEEN, "}]")
    ),
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
