"""Calls written in Python: ``[get_weather(city="Oslo", days=3), get_time()]``, with which the text begins.

An argument is passed on when it is complete, and left out if the text ends within it. A value that is no literal of
Python (a word without quotes) is passed on as a string.
"""

from __future__ import annotations

import ast
import json
import warnings

from jaxserve.server.parsers.source import Source, Steps, Tools
from jaxserve.tokenizer import replace_surrogates

__all__ = ["literal", "pythonic"]

_CONSTANTS = {"true": "true", "false": "false", "null": "null"}


def pythonic(source: Source, tools: Tools) -> Steps[None]:
    """A list of calls; what follows it is content."""
    source.record()
    yield from source.skip_space()
    yield from source.accept("<|python_start|>")
    yield from source.skip_space()
    whole = False
    if (yield from source.accept("[")):
        while not whole:
            yield from source.skip_space(also=",")
            whole = (yield from source.accept("]")) is not None
            if whole or not (yield from _call(source, tools)):
                break
            source.recorded()
    if source.num_calls == 0:
        source.emit("content", source.recorded())
    elif whole:
        yield from source.end_call("<|python_end|>")
    else:
        yield from source.read_until("<|python_end|>")
    yield from source.rest("content")


def literal(text: str) -> str:
    """A Python or JSON literal as JSON; anything else as a JSON string."""
    text = text.strip()
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of escapes that Python does not know
            value = ast.literal_eval(text)
        return replace_surrogates(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return json.dumps(text, ensure_ascii=False)


def _call(source: Source, tools: Tools) -> Steps[bool]:
    """Read a call; False if it is none, or not all there."""
    name = yield from source.read_while(lambda char: char.isalnum() or char in "_.-")
    if name not in tools or not (yield from source.accept("(")):
        return False
    source.begin_call(name)
    separator, good = "{", True
    while True:
        yield from source.skip_space(also=",")
        if (yield from source.accept(")")):
            break
        key = yield from source.read_while(lambda char: char.isalnum() or char == "_")
        yield from source.skip_space()
        value = (yield from _value(source)) if key and (yield from source.accept("=")) else None
        if value is None:
            good = False
            break
        source.emit("arguments", f"{separator}{json.dumps(key, ensure_ascii=False)}:{literal(value)}")
        separator = ","
    source.emit("arguments", "}" if separator == "," else "{}")
    return good


def _value(source: Source) -> Steps[str | None]:
    """Read up to the comma or bracket after a value; None if it does not come."""
    depth, quote, escaped = 0, "", False

    def belongs(char: str) -> bool:
        nonlocal depth, quote, escaped
        if quote:
            quote = "" if char == quote and not escaped else quote
            escaped = char == "\\" and not escaped
        elif char in "'\"":
            quote = char
        elif char in "([{":
            depth += 1
        elif depth == 0 and char in ",)]}":
            return False
        elif char in ")]}":
            depth -= 1
        return True

    value = yield from source.read_while(belongs)
    return value if (yield from source.at(",", ")")) else None
