"""Structures that begin within free text: wherever one of some marks appears, a tag must follow that begins with it.

A tag is a beginning, JSON that fits a schema, and an end. Marks, beginnings and ends may hold tokens that are no text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxserve.errors import RequestError
from jaxserve.structured.vocabulary import Vocabulary

__all__ = ["tags_grammar", "tags_of"]

_MOST_TAGS = 1024


def tags_of(wanted: Any) -> tuple[list[tuple[str, Any, str]], list[str]]:
    """The tags (beginning, schema, end) and marks of ``{"structures": [{"begin", "schema", "end"}], "triggers": […]}``,
    each beginning after its mark. RequestError: it is something else."""
    if not isinstance(wanted, Mapping) or wanted.keys() - {"type", "structures", "triggers"}:
        raise _refused("must be an object with structures and triggers")
    structures, triggers = wanted.get("structures"), wanted.get("triggers")
    if not isinstance(triggers, list) or not triggers or not all(isinstance(t, str) and t for t in triggers):
        raise _refused("needs triggers, a list of non-empty strings")
    if not isinstance(structures, list) or not 0 < len(structures) <= _MOST_TAGS:
        raise _refused(f"needs structures, a list of 1 to {_MOST_TAGS}")
    tags = []
    for tag in structures:
        if (
            not isinstance(tag, Mapping)
            or tag.keys() - {"begin", "schema", "end"}
            or not isinstance(tag.get("schema", {}), dict | bool)
        ):
            raise _refused("needs structures with begin, schema and end")
        begin, end = tag.get("begin"), tag.get("end", "")
        if not isinstance(begin, str) or not isinstance(end, str):
            raise _refused("needs structures whose begin and end are strings")
        if not any(begin.startswith(trigger) for trigger in triggers):
            raise _refused(f"holds a structure that begins with none of the triggers: {begin[:40]!r}")
        tags.append((begin, tag.get("schema", {}), end))
    return tags, triggers


def tags_grammar(
    wanted: Any, vocabulary: Vocabulary, literal: Callable[[str], str], settled: Callable[[Any], Any]
) -> str:
    """The grammar in Lark's form. ``literal`` writes a text, ``settled`` says how a schema is to be taken."""
    tags, triggers = tags_of(wanted)
    special = {vocabulary.tokens[token].decode("utf-8", "replace"): token for token in vocabulary.special_ids}
    text = _Text(special, literal)
    rules, options = [], []
    for number, trigger in enumerate(triggers):
        bodies = []
        for tag, (begin, schema, end) in enumerate(tags):
            # Where one mark begins another, a tag belongs to the longest.
            if trigger == max((t for t in triggers if begin.startswith(t)), key=len):
                bodies.append(f"body{tag}")
                rest = begin[len(trigger) :]
                rules.append(f"body{tag}: {text.written(rest)} %json {json.dumps(settled(schema))} {text.written(end)}")
        if not bodies:
            raise _refused(f"holds a trigger with which no structure begins: {trigger[:40]!r}")
        marks = [f"mark{number}"]
        rules.append(f"mark{number}[lazy]: /(.|\\n)*/ {literal(trigger)}")
        if trigger in special:
            marks.append(f"token{number}")
            rules.append(f"token{number}: TEXT <[{special[trigger]}]>")
        rules.append(f"tag{number}: ({' | '.join(marks)}) ({' | '.join(bodies)})")
        options.append(f"tag{number}")
    return "\n".join([f"start: ({' | '.join(options)})* TEXT", "TEXT: /(.|\\n)*/", *rules, ""])


class _Text:
    """Writes texts in which some words are tokens of their own."""

    def __init__(self, special: Mapping[str, int], literal: Callable[[str], str]) -> None:
        self._special = special
        self._literal = literal
        words = sorted(filter(None, special), key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(map(re.escape, words))})") if words else None

    def written(self, text: str) -> str:
        """The text in Lark's form; nothing for an empty one."""
        parts: Sequence[str] = self._pattern.split(text) if self._pattern else [text]
        return " ".join(
            f"<[{self._special[part]}]>" if part in self._special else self._literal(part) for part in parts if part
        )


def _refused(why: str) -> RequestError:
    return RequestError(f"structured_outputs.structural_tag {why}.", "structured_outputs")
