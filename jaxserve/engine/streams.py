"""What ``AsyncLLM`` keeps of requests whose generators are open, and how it asks the engine's thread for something."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from jaxserve.errors import EngineDeadError
from jaxserve.live import Entry
from jaxserve.outputs import RequestOutput

__all__ = ["Pace", "Stream", "answer_of"]

_LOOK_SECONDS = 0.2

_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class Stream:
    """A request whose generator is open: its number of completions, what is known of it, and what is to be yielded.

    It has ``ended`` when its last output is in the queue, though its client may never take it out.
    """

    n: int
    entry: Entry
    aborted: bool = False
    ended: bool = False
    queue: asyncio.Queue[RequestOutput | EngineDeadError] = field(default_factory=asyncio.Queue)

    def put(self, output: RequestOutput) -> None:
        """Some of the answer is there."""
        self.queue.put_nowait(output)
        self.ended = output.finished
        self.entry.note(output)


class Pace:
    """How many seconds pass between the ends of requests lately; a place in the queue is free at each."""

    def __init__(self) -> None:
        self.seconds_per_end = 1.0
        self._newest = time.monotonic()

    def note(self) -> None:
        """A request has ended."""
        now = time.monotonic()
        self.seconds_per_end += 0.1 * (min(now - self._newest, 60.0) - self.seconds_per_end)
        self._newest = now


async def answer_of(
    function: Callable[[], _T], call: Callable[[Callable[[], None]], None], check: Callable[[], None]
) -> _T:
    """What ``function`` returns or raises when ``call`` has brought it to another thread.

    That thread may end before it comes to it: ``check`` is asked from time to time, and raises if it has.
    """
    done: Future[_T] = Future()

    def run() -> None:
        if not done.set_running_or_notify_cancel():  # who asked has gone
            return
        try:
            done.set_result(function())
        except Exception as error:
            done.set_exception(error)

    check()
    call(run)
    waiting = asyncio.wrap_future(done)
    try:
        while not (await asyncio.wait({waiting}, timeout=_LOOK_SECONDS))[0]:
            check()
        return waiting.result()
    finally:
        waiting.cancel()
