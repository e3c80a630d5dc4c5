"""Text that comes in pieces, read as if it were there: what all parsers of outputs are made of.

A parser is a generator over a ``Source``: it reads like a program that has the whole text, and yields where it needs
more of it. Every decision waits until the text decides it, so that how the text was cut never matters: what a parser
emits for a text is the same in one piece, in a thousand, and without streaming, where the whole text is one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

__all__ = ["Event", "Machine", "Parse", "ParseCalls", "Source", "Steps", "Tools"]

_T = TypeVar("_T")

Steps = Generator[None, None, _T]
"""What reads a source, and at its end gives a value; it yields to wait for more text."""

Parse = Callable[["Source"], Steps[None]]
"""A parser: reads a source to its end."""

Tools = Mapping[str, Mapping[str, Any]]
"""The parameters' JSON schema of each tool by its name."""

ParseCalls = Callable[["Source", Tools], Steps[None]]
"""A parser of content with calls of tools in it."""

Kind = Literal["content", "reasoning", "name", "arguments"]
_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that is certain now.

    Attributes:
        kind: a piece of content, a piece of reasoning, a call's name (which begins the call), a piece of its arguments.
        text: the piece, or the name.
        index: the number of the call.
    """

    kind: Kind
    text: str
    index: int = 0


class Source:
    """The text that was not read yet, and what was found in the text before.

    Attributes:
        ended: no text will follow.
        events: found since they were last taken away.
        num_calls: calls begun so far.
        gap: whitespace that the newest ``copy`` left out before its mark.
    """

    def __init__(self) -> None:
        self.ended = False
        self.events: list[Event] = []
        self.gap = ""
        self._text = ""
        self._start = 0
        self._record: list[str] | None = None
        self.num_calls = 0

    def feed(self, text: str) -> None:
        """Append text."""
        self._text = self._text[self._start :] + text
        self._start = 0

    # ------------------------------------------------------------------ what is found
    def emit(self, kind: Kind, text: str) -> None:
        """Add a piece of text, or of the arguments of the newest call."""
        if text:
            self.events.append(Event(kind, text, max(self.num_calls - 1, 0)))

    def begin_call(self, name: str) -> None:
        """Add a call."""
        self.num_calls += 1
        self.emit("name", name)

    # ------------------------------------------------------------------ reading without waiting
    @property
    def unread(self) -> str:
        """What is there."""
        return self._text[self._start :]

    def take(self, count: int) -> str:
        """The next ``count`` characters, which must be there."""
        taken = self._text[self._start : self._start + count]
        self._start += count
        if self._record is not None:
            self._record.append(taken)
        return taken

    def record(self) -> None:
        """Keep what is read from now on, in case it turns out to be mere text."""
        self._record = []

    def recorded(self) -> str:
        """What was read since ``record``."""
        kept, self._record = "".join(self._record or ()), None
        return kept

    # ------------------------------------------------------------------ reading
    def more(self) -> Steps[bool]:
        """Wait for more text; False if none will come."""
        if self.ended:
            return False
        yield
        return True

    def skip_space(self, also: str = "") -> Steps[None]:
        """Read whitespace and the characters of ``also``."""
        while True:
            unread = self.unread
            self.take(len(unread) - len(unread.lstrip(_SPACE + also)))
            if self._start < len(self._text) or not (yield from self.more()):
                return

    def at(self, *options: str) -> Steps[str | None]:
        """Which of the texts comes next, None if another does; none may be the beginning of another."""
        while True:
            unread = self.unread
            for option in options:
                if unread.startswith(option):
                    return option
            undecided = any(option.startswith(unread) for option in options)
            if not undecided or not (yield from self.more()):
                return None

    def read_while(self, belongs: Callable[[str], bool]) -> Steps[str]:
        """Read characters for as long as they belong."""
        read: list[str] = []
        while True:
            unread = self.unread
            count = next((i for i, char in enumerate(unread) if not belongs(char)), len(unread))
            read.append(self.take(count))
            if count < len(unread) or not (yield from self.more()):
                return "".join(read)

    def read_until(self, *marks: str) -> Steps[tuple[str, str | None]]:
        """Read text and the mark after it, which is None if the text ends before."""
        read: list[str] = []
        mark = yield from self.copy(marks, read.append)
        return "".join(read), mark

    def rest(self, kind: Kind | None) -> Steps[None]:
        """Read all there will be, as pieces of a kind, or to be dropped."""
        yield from self.copy((), lambda text: None if kind is None else self.emit(kind, text))

    def accept(self, *options: str) -> Steps[str | None]:
        """Read one of the texts, if one comes next."""
        found = yield from self.at(*options)
        if found is not None:
            self.take(len(found))
        return found

    def end_call(self, *ends: str) -> Steps[None]:
        """Read whitespace around one of the marks that may end a call, and the mark."""
        yield from self.skip_space()
        if (yield from self.accept(*ends)):
            yield from self.skip_space()

    def copy(self, marks: Sequence[str], sink: Callable[[str], None], *, strip: bool = False) -> Steps[str | None]:
        """Hand over text up to the first of the marks, which is read; None if the text ends without one.

        Only what may be the beginning of a mark is held back. With ``strip``, so is whitespace, which is left out
        before a mark (see ``gap``).
        """
        while True:
            unread = self.unread
            found = min(((at, mark) for mark in marks if (at := unread.find(mark)) >= 0), default=None)
            end = found[0] if found else len(unread) if self.ended else len(unread) - _held(unread, marks)
            if strip and not (self.ended and found is None):
                kept = len(unread[:end].rstrip(_SPACE))
                self.gap, end = unread[kept:end], kept
            if end:
                sink(self.take(end))
            if found is not None:
                self.take(len(found[1]) + found[0] - end)
                return found[1]
            if not (yield from self.more()):
                self.gap = ""
                return None


def _held(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that begins one of the marks."""
    longest = min(max(map(len, marks), default=1) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if any(mark.startswith(text[-n:]) for mark in marks)), 0)


class Machine:
    """A parser at work."""

    def __init__(self, parse: Parse) -> None:
        self._source = Source()
        self._steps = parse(self._source)
        self._run()

    def push(self, text: str) -> list[Event]:
        """Take more text; what is certain now."""
        self._source.feed(text)
        return self._run()

    def finish(self) -> list[Event]:
        """There is no more text; what is left."""
        self._source.ended = True
        return self._run()

    def _run(self) -> list[Event]:
        next(self._steps, None)
        events, self._source.events = self._source.events, []
        return events
