"""What a schema or regular expression must be before a compiler sees it.

llguidance takes quantifiers that have nothing to repeat (``^{2}x``, ``foo**``), which every other engine refuses, and
drops a backslash at the end. What a user of those would get is not what was meant, so they are errors here. A regular
expression of many parts may take it time in their square, which it does not count, so their length is limited.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from jaxserve.errors import RequestError

__all__ = ["check_regex", "closed", "patterns"]

_PIECE = re.compile(
    r"""
    (?P<atom>\\(?:[pPxu]\{[^}]*\}|.)          # an escape
      | \[\^?\]?(?:\\.|\[:\w+:\]|[^\]\\])*\]   # a class
      | [^\\\[(|)*+?{^$])
    | (?P<open>\((?:\?(?:P?<\w+>|[a-zA-Z-]*:|[=!]|<[=!]))?)
    | (?P<quantifier>[*+?]|\{\d*,?\d*\})
    | (?P<nothing>[|^$])
    | (?P<close>\))
    | (?P<brace>\{)
    """,
    re.VERBOSE | re.DOTALL,
)


_MAX_REGEX = 2**14


def check_regex(regex: str, where: str) -> None:
    """RequestError naming ``where``: too long, or a quantifier or the last backslash has nothing to work on."""
    if len(regex) > _MAX_REGEX:
        raise _refusal(where, f"it is {len(regex)} characters long and the limit is {_MAX_REGEX}")
    before, start = "nothing", 0
    while start < len(regex):
        if regex.startswith(("(?i)", "(?s)", "(?m)", "(?x)"), start):
            start += 4
            continue
        match = _PIECE.match(regex, start)
        if match is None:  # an unclosed class, or a backslash at the end
            raise _refusal(where, "it ends within an escape or a class")
        kind = match.lastgroup or ""
        if kind == "quantifier":
            lazy = match[0] == "?" and before == "quantifier"
            if before not in ("atom", "close") and not lazy:
                raise _refusal(where, f"there is nothing to repeat before {match[0]!r} at character {start + 1}")
            kind = "lazy" if lazy else kind
        before, start = kind, match.end()


def patterns(schema: Any) -> Iterator[str]:
    """All regular expressions of a JSON schema, wherever they stand."""
    for node in _objects(schema):
        if isinstance(pattern := node.get("pattern"), str):
            yield pattern
        if isinstance(named := node.get("patternProperties"), dict):
            yield from named


def closed(schema: Any) -> Any:
    """A copy of a JSON schema in which objects that do not say otherwise take no further properties."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    copy = {key: value if key in ("enum", "const") else closed(value) for key, value in schema.items()}
    if schema.get("type") == "object" or isinstance(schema.get("properties"), dict):
        copy.setdefault("additionalProperties", False)
    return copy


def _objects(schema: Any) -> Iterator[dict[str, Any]]:
    todo = [schema]
    while todo:
        node = todo.pop()
        if isinstance(node, dict):
            yield node
            todo += [value for key, value in node.items() if key not in ("enum", "const", "default", "examples")]
        elif isinstance(node, list):
            todo += node


def _refusal(where: str, why: str) -> RequestError:
    return RequestError(f"structured_outputs.{where}: the regular expression is invalid, {why}.", "structured_outputs")
