"""What a model thinks before it answers, between ``<think>`` and ``</think>``.

Some models write both marks, some templates write the first one into the prompt. Whitespace around the marks belongs to
neither side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxserve.server.parsers.source import Parse, Source, Steps

__all__ = ["END", "REASONING_PARSERS", "START", "ReasoningParser"]

START, END = "<think>", "</think>"


@dataclass(frozen=True)
class ReasoningParser:
    """How a family of models thinks.

    Attributes:
        implied: the answer begins inside, unless the prompt ends with a thought that is closed.
        anywhere: thoughts may come later too, and more than one.
    """

    implied: bool = False
    anywhere: bool = False

    def begins_inside(self, prompt_end: str) -> bool:
        """Whether the answer to a prompt that ends so begins inside a thought."""
        prompt_end = prompt_end.rstrip()
        return prompt_end.endswith(START) or (self.implied and not prompt_end.endswith(END))

    def parse(self, inside: bool) -> Parse:
        """The parser of an answer that begins inside a thought, or not."""
        return lambda source: _parse(source, inside, self.anywhere)


REASONING_PARSERS: dict[str, ReasoningParser] = {
    "deepseek_r1": ReasoningParser(implied=True),
    "qwen3": ReasoningParser(),
    "think": ReasoningParser(anywhere=True),
}


def _parse(source: Source, inside: bool, anywhere: bool) -> Steps[None]:
    content: Callable[[str], None] = lambda text: source.emit("content", text)  # noqa: E731
    source.record()
    yield from source.skip_space()
    marked = yield from source.accept(START)
    begun = source.recorded()
    if not (inside or marked):
        content(begun)
        if not anywhere or not (yield from source.copy((START,), content)):
            yield from source.rest("content")
            return
    while True:
        yield from source.skip_space()
        yield from source.copy((END,), lambda text: source.emit("reasoning", text), strip=True)
        yield from source.skip_space()
        if not anywhere or not (yield from source.copy((START,), content)):
            break
    yield from source.rest("content")
