"""Stop strings in text that arrives in pieces.

All stop strings form one automaton (Aho-Corasick). Its state after a character is the longest suffix of the text that
begins some stop string, and that one quantity answers everything: a state in which a string ends is a match, and the
suffix itself is what must be held back, because it might still become one. Nothing else is ever withheld, and the cost
per character does not depend on the number or length of the strings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["StopMatcher"]


@dataclass(slots=True, eq=False)
class _State:
    """A prefix of some stop string.

    Attributes:
        depth: its length.
        next: the state after one more character of a stop string.
        fallback: the longest proper suffix that is a prefix too; None for the root.
        match: the longest stop string that ends here, "" for none.
        held: length of the longest suffix that could still grow into a stop string.
    """

    depth: int = 0
    next: dict[str, _State] = field(default_factory=dict)
    fallback: _State | None = None
    match: str = ""
    held: int = 0


class StopMatcher:
    """Finds the stop string that completes first; of several that complete at the same character, the longest."""

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        self._root = self._state = _automaton(stops)
        self._include = include_in_output
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """Take more text; answers (text that may be sent, stop string that completed or None).

        After a match nothing more comes out. With ``armed=False`` a string that completes within ``text`` is let pass.
        """
        if self._matched is not None:
            return "", None
        if not self._root.next:
            return text, None
        seen = self._held + text
        state = self._state
        for end, char in enumerate(text, start=len(self._held) + 1):
            state = _step(state, char)
            if armed and state.match:
                self._matched, self._held = state.match, ""
                return seen[: end if self._include else end - len(state.match)], state.match
        self._state = state
        sent = len(seen) - state.held
        self._held = seen[sent:]
        return seen[:sent], None

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held, self._state = self._held, "", self._root
        return held


def _step(state: _State, char: str) -> _State:
    while char not in state.next:
        if state.fallback is None:
            return state
        state = state.fallback
    return state.next[char]


def _automaton(stops: Sequence[str]) -> _State:
    root = _State()
    for stop in stops:
        state = root
        for char in stop:
            state = state.next.setdefault(char, _State(state.depth + 1))
        state.match = stop
    queue = deque([root])
    while queue:  # by depth: a fallback is always finished before the states that use it
        state = queue.popleft()
        for char, child in state.next.items():
            child.fallback = _step(state.fallback, char) if state.fallback is not None else root
            child.match = child.match or child.fallback.match
            child.held = child.depth if child.next else child.fallback.held
            queue.append(child)
    return root
