"""May this waiting request start now?

Memory is asked by the scheduler itself. Everything else that can hold a request back (a free adapter
slot) is an ``AdmissionRule``, so that the scheduler knows none of them by name.

A request that cannot start does not hold up the others at once: smaller ones may overtake it. But each admission past
it uses up its ``Patience``, and when that is gone nothing passes any more until it has started.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Protocol

from jaxserve.request import Request

__all__ = ["AdmissionRule", "Patience", "StaticBatching"]


class AdmissionRule(Protocol):
    """One condition for starting a request.

    Attributes:
        holds_place: whether a refused request waits for *running* ones to end (slots), and so may in the end stop
            others from overtaking it; False if it waits for something else, such as an adapter that is being loaded.
    """

    @property
    def holds_place(self) -> bool: ...

    def begin_step(self, running: Collection[Request]) -> None:
        """A step is about to be planned; ``running`` have started before."""

    def admits(self, request: Request, running: Collection[Request]) -> bool:
        """Whether ``request`` may start beside ``running``."""

    def note_admitted(self, request: Request) -> None:
        """``request`` has started, or was resumed after a preemption."""

    def note_released(self, request: Request) -> None:
        """``request``, which had started, has ended or was preempted."""


class Patience:
    """How long the first blocked request lets others overtake it.

    Args:
        max_overtakes: most admissions past it.
        max_seconds: longest time from when it was first found blocked.
        clock: the time in seconds.
    """

    def __init__(
        self, max_overtakes: int = 16, max_seconds: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_overtakes = max_overtakes
        self._max_seconds = max_seconds
        self._clock = clock
        self._head: Request | None = None
        self._overtakes = 0
        self._since = 0.0

    def note_blocked(self, head: Request) -> None:
        """``head`` is the first request that cannot start; a new one starts with fresh patience."""
        if head is not self._head:
            self._head, self._overtakes, self._since = head, 0, self._clock()

    def note_overtaken(self) -> None:
        """A request behind the head was admitted."""
        self._overtakes += 1

    @property
    def exhausted(self) -> bool:
        """Whether nothing may overtake the head any more."""
        return self._overtakes >= self._max_overtakes or self._clock() - self._since >= self._max_seconds


class StaticBatching:
    """A batch is made of what waits when nothing runs, and nobody joins it later: the opposite of continuous batching.

    A large batch may take several steps to start, so it stays open for those who had arrived by then, until its first
    member ends. A member that was preempted may come back at any time.

    Args:
        clock: the time in seconds, as in ``Request.arrived_at``.
    """

    holds_place = True

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._opened_at = 0.0
        self._is_open = False

    def begin_step(self, running: Collection[Request]) -> None:
        """Nothing to do."""

    def admits(self, request: Request, running: Collection[Request]) -> bool:
        """Whether ``request`` opens a batch or belongs to the one that ``running`` are of."""
        if not running:
            self._opened_at, self._is_open = self._clock(), True
        return request.preemptions > 0 or (self._is_open and request.arrived_at <= self._opened_at)

    def note_admitted(self, request: Request) -> None:
        """A member has started."""

    def note_released(self, request: Request) -> None:
        """A member has ended, or was preempted."""
        if request.finish is not None:
            self._is_open = False
