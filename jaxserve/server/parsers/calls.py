"""Calls written as JSON, in all their wrappings: hermes, granite, mistral, llama3_json and plain json.

A call is an object with a ``name`` and ``arguments`` (or ``parameters``), alone, in a list, or several in a row. It is
one only if it names a tool of the request; anything else is text of the answer, as it stands. What a model writes of
the arguments is passed on while it is written. Where it stops being JSON, what is open is closed, and the text up to
the end of the call is left out. Whitespace around calls belongs to nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import Enum, auto

from jaxserve.server.parsers.json_text import JsonText
from jaxserve.server.parsers.source import ParseCalls, Source, Steps, Tools

__all__ = ["arguments_of", "leading", "llama3_json", "marked", "mistral"]

_ARGUMENTS = ("arguments", "parameters")
_PYTHON_TAG = "<|python_tag|>"


class _Found(Enum):
    CALLS = auto()  # calls, and nothing else
    TEXT = auto()  # not a call: nothing was emitted
    BROKEN = auto()  # a call was begun, but from here on it is no JSON


def marked(marks: tuple[str, ...], end: str) -> ParseCalls:
    """Calls after one of the marks, anywhere in the text; ``end`` may close them."""

    def parse(source: Source, tools: Tools) -> Steps[None]:
        while mark := (yield from source.copy(marks, lambda text: source.emit("content", text), strip=True)):
            gap = source.gap
            source.record()
            found = yield from _calls(source, tools)
            read = source.recorded()
            if found is _Found.TEXT:
                source.emit("content", gap + mark + read)
            elif found is _Found.BROKEN:
                yield from source.read_until(end)
            else:
                yield from source.end_call(end)

    return parse


def leading(source: Source, tools: Tools) -> Steps[None]:
    """Calls with which the text begins, maybe in a Markdown fence; what follows is content."""
    yield from _lead(source, tools, "```json", "```")
    yield from source.rest("content")


def llama3_json(source: Source, tools: Tools) -> Steps[None]:
    """Calls with which the text begins, or after a mark within it."""
    yield from _lead(source, tools)
    yield from marked((_PYTHON_TAG,), "<|eom_id|>")(source, tools)


def mistral(source: Source, tools: Tools) -> Steps[None]:
    """``[TOOL_CALLS][{...}, ...]`` as older models write it, or ``[TOOL_CALLS]name[ARGS]{...}`` per call."""
    mark = "[TOOL_CALLS]"
    while (yield from source.copy((mark,), lambda text: source.emit("content", text), strip=True)):
        gap = source.gap
        source.record()
        yield from source.skip_space()
        if (yield from source.at("[", "{")):
            found = yield from _calls(source, tools)
        else:
            found = yield from _named_call(source, tools)
        read = source.recorded()
        if found is _Found.TEXT:
            source.emit("content", gap + mark + read)


def arguments_of(name: str) -> ParseCalls:
    """The whole text is the arguments of one call."""

    def parse(source: Source, tools: Tools) -> Steps[None]:
        yield from source.skip_space()
        source.begin_call(name)
        yield from _arguments(source)
        yield from source.rest(None)

    return parse


def _lead(source: Source, tools: Tools, fence: str = "", close: str = "") -> Steps[None]:
    found: _Found | None = None
    source.record()
    yield from source.skip_space()
    fenced = (yield from source.accept(fence)) if fence else None
    yield from source.skip_space()
    while found in (None, _Found.CALLS) and (yield from source.at("{", "[")):
        if found is not None:
            source.record()
        found = yield from _calls(source, tools, needs_arguments=True)
        if found is _Found.CALLS:
            source.recorded()
            yield from source.skip_space(also=";,")
    if found is _Found.BROKEN:
        yield from source.rest(None)
    elif found is _Found.CALLS and fenced:
        yield from source.end_call(close)
    source.emit("content", source.recorded())


def _named_call(source: Source, tools: Tools) -> Steps[_Found]:
    name, mark = yield from source.read_until("[ARGS]", "[CALL_ID]", "{")
    if mark == "[CALL_ID]":
        _, mark = yield from source.read_until("[ARGS]", "{")
    if mark is None or name.strip() not in tools:
        return _Found.TEXT
    source.begin_call(name.strip())
    yield from source.skip_space()
    yield from _arguments(source, "{" if mark == "{" else "")
    return _Found.CALLS


def _calls(source: Source, tools: Tools, *, needs_arguments: bool = False) -> Steps[_Found]:
    """Read a call or a list of calls."""
    yield from source.skip_space()
    if not (yield from source.accept("[")):
        return (yield from _call(source, tools, needs_arguments))
    found = _Found.TEXT
    while True:
        yield from source.skip_space(also=",")
        if (yield from source.accept("]")):
            return found
        next_one = yield from _call(source, tools, needs_arguments)
        if next_one is not _Found.CALLS:
            return _Found.BROKEN if found is _Found.CALLS else next_one
        found = _Found.CALLS


def _call(source: Source, tools: Tools, needs_arguments: bool) -> Steps[_Found]:
    """Read an object that should be a call."""
    name: str | None = None
    held: list[str] = []  # arguments that came before the name
    begun = is_json = False
    if not (yield from source.accept("{")):
        return _Found.TEXT
    while not is_json:
        yield from source.skip_space(also=",")
        if is_json := (yield from source.accept("}")) is not None:
            break
        key = yield from _string(source)
        yield from source.skip_space()
        if key is None or not (yield from source.accept(":")):
            break
        yield from source.skip_space()
        if key == "name" and name is None:
            name = yield from _string(source)
            if name is None or name not in tools:
                return _Found.TEXT
        elif key in _ARGUMENTS and not (begun or held):
            if begun := name is not None:
                source.begin_call(name or "")
            if not (yield from _arguments(source, sink=None if begun else held.append)):
                break
        elif not (yield from _value(source, lambda text: None)):
            break
    if not begun:
        if name is None or (needs_arguments and not held):
            return _Found.TEXT
        source.begin_call(name)
        source.emit("arguments", "".join(held) or "{}")
    return _Found.CALLS if is_json else _Found.BROKEN


def _arguments(source: Source, given: str = "", sink: Callable[[str], None] | None = None) -> Steps[bool]:
    """Read arguments, of which ``given`` was read already; False if they are no JSON, or not all there."""
    emitted = False

    def emit(text: str) -> None:
        nonlocal emitted
        emitted = emitted or bool(text)
        if sink is not None:
            sink(text)
        else:
            source.emit("arguments", text)

    if (yield from source.at('"')):
        pieces: list[str] = []
        good = yield from _value(source, pieces.append)
        emit(_unpacked("".join(pieces)))
        return good
    good = yield from _value(source, emit, given)
    if not emitted:
        emit("{}")
    return good


def _unpacked(text: str) -> str:
    """Some models write arguments as a string that holds JSON, as it is in the API."""
    inner = JsonText()
    inner.push(json.loads(text).strip())
    unpacked = inner.pull() + inner.close()
    return unpacked if unpacked.startswith("{") else text


def _string(source: Source) -> Steps[str | None]:
    """Read a JSON string; None if it is none, or not all there."""
    pieces: list[str] = []
    if not (yield from source.at('"')) or not (yield from _value(source, pieces.append)):
        return None
    return str(json.loads("".join(pieces)))


def _value(source: Source, sink: Callable[[str], None], given: str = "") -> Steps[bool]:
    """Read a JSON value and hand it over in pieces that make valid JSON; False if it was no JSON or not all there."""
    value = JsonText()
    value.push(given)
    while True:
        source.take(value.push(source.unread))
        sink(value.pull())
        if value.done:
            return True
        if value.failed or not (yield from source.more()):
            sink(value.close())
            return False
