"""One answer taken apart: text in pieces goes in, what it means comes out, the same for every way of cutting it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from jaxserve.server.parsers.source import Event, Machine, Parse, ParseCalls, Tools

__all__ = ["Call", "OutputParser", "Piece"]


@dataclass
class Call:
    """A call, or while it is being written the new part of it, where only the first one has the name."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass
class Piece:
    """What is new in an answer: pieces of reasoning and content, and of calls in their order."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


class OutputParser:
    """Takes one answer apart.

    Args:
        reasoning: separates what was thought, None if nothing is to be.
        calls: finds calls in the rest, None if there can be none.
        tools: those that may be called.
        max_calls: calls after so many are left out.
    """

    def __init__(
        self,
        reasoning: Parse | None = None,
        calls: ParseCalls | None = None,
        tools: Tools | None = None,
        max_calls: int | None = None,
    ) -> None:
        self._reasoning = None if reasoning is None else Machine(reasoning)
        self._calls = None if calls is None else Machine(lambda source: calls(source, tools or {}))
        self._max_calls = max_calls
        self.num_calls = 0

    def push(self, text: str, *, last: bool = False) -> Piece:
        """Take more text, maybe the last; what is certain now."""
        return _piece(self.read(text, last=last))

    def read(self, text: str, *, last: bool = False) -> list[Event]:
        """As ``push``, in the order in which it was written."""
        events = [Event("content", text)] if self._reasoning is None else self._reasoning.push(text)
        if last and self._reasoning is not None:
            events += self._reasoning.finish()
        events = self._find_calls(events)
        if last and self._calls is not None:
            events += self._calls.finish()
        kept = [event for event in events if not self._is_surplus(event)]
        self.num_calls += sum(event.kind == "name" for event in kept)
        return kept

    def _is_surplus(self, event: Event) -> bool:
        return event.kind in ("name", "arguments") and self._max_calls is not None and event.index >= self._max_calls

    def _find_calls(self, events: list[Event]) -> list[Event]:
        if self._calls is None:
            return events
        found: list[Event] = []
        for event in events:
            found += self._calls.push(event.text) if event.kind == "content" else [event]
        return found


def _piece(events: Iterable[Event]) -> Piece:
    piece = Piece()
    for event in events:
        if event.kind == "content":
            piece.content += event.text
        elif event.kind == "reasoning":
            piece.reasoning += event.text
        else:
            if not piece.calls or piece.calls[-1].index != event.index:
                piece.calls.append(Call(event.index))
            if event.kind == "name":
                piece.calls[-1].name = event.text
            else:
                piece.calls[-1].arguments += event.text
    return piece
