"""Calls written in tags, one per parameter, as Qwen3-Coder does::

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Oslo
    </parameter>
    </function>
    </tool_call>

What a parameter's text means depends on its type in the tool's schema: strings are passed on as they come, without the
line breaks around them; all else is read as JSON or Python when it is complete, and left out if the text ends before.
"""

from __future__ import annotations

import json
from typing import Any

from jaxserve.server.parsers.pythonic import literal
from jaxserve.server.parsers.source import Source, Steps, Tools

__all__ = ["qwen3_xml"]

_BLOCK, _FUNCTION, _PARAMETER = "<tool_call>", "<function=", "<parameter="
_END_BLOCK, _END_FUNCTION, _END_PARAMETER = "</tool_call>", "</function>", "</parameter>"


def qwen3_xml(source: Source, tools: Tools) -> Steps[None]:
    """Calls anywhere in the text; the outer tag may be missing."""
    while mark := (yield from source.copy((_BLOCK, _FUNCTION), lambda text: source.emit("content", text), strip=True)):
        gap = source.gap
        source.record()
        yield from source.skip_space()
        if mark == _FUNCTION or (yield from source.accept(_FUNCTION)):
            name, closed = yield from source.read_until(">")
            if closed and name.strip() in tools:
                source.recorded()
                yield from _call(source, name.strip(), tools[name.strip()])
                continue
        source.emit("content", gap + mark + source.recorded())


def _call(source: Source, name: str, schema: Any) -> Steps[None]:
    source.begin_call(name)
    separator = "{"
    while True:
        yield from source.skip_space()
        tag = yield from source.accept(_PARAMETER, _END_FUNCTION, _END_BLOCK)
        key, closed = (yield from source.read_until(">")) if tag == _PARAMETER else ("", None)
        if not closed:
            break
        before = f"{separator}{json.dumps(key.strip(), ensure_ascii=False)}:"
        if _type_of(schema, key.strip()) == "string":
            source.emit("arguments", before + '"')
            whole = yield from _stream_string(source)
            source.emit("arguments", '"')
        else:
            text, end = yield from source.read_until(_END_PARAMETER)
            whole = end is not None
            if not whole:
                break
            source.emit("arguments", before + literal(text))
        separator = ","
        if not whole:
            break
    source.emit("arguments", "}" if separator == "," else "{}")
    if tag not in (_END_FUNCTION, _END_BLOCK):
        yield from source.read_until(_END_BLOCK)
    yield from source.end_call(_END_BLOCK)


def _type_of(schema: Any, key: str) -> Any:
    properties = schema.get("properties")
    parameter = properties.get(key) if isinstance(properties, dict) else None
    return parameter.get("type") if isinstance(parameter, dict) else None


def _stream_string(source: Source) -> Steps[bool]:
    """Emit a string's text, without a line break at either end; False if its end does not come."""
    yield from source.accept("\n")
    held = ""

    def sink(text: str) -> None:
        nonlocal held
        text = held + text
        held = "\n" if text.endswith("\n") else ""
        source.emit("arguments", json.dumps(text.removesuffix("\n"), ensure_ascii=False)[1:-1])

    return (yield from source.copy((_END_PARAMETER,), sink)) is not None
