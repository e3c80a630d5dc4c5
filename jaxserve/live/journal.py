"""Every request from its arrival on, and the newest of those that have ended.

The engine notes what happens to a request on the request itself, as plain numbers. While it runs the journal reads them
there; when it has ended it keeps a copy, which does not hold on to its tokens.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxserve.outputs import RequestOutput
from jaxserve.request import FinishReason, Request, SpeculationStats

__all__ = ["Entry", "Journal", "Part", "Report"]

_MAX_FINISHED = 1000


@dataclass(frozen=True, slots=True)
class Part:
    """One completion of a request, as of one moment.

    Attributes:
        state: "waiting", "running" or "finished".
        finish_reason: why it ended, None before.
        prompt_tokens, cached_tokens, output_tokens: of the prompt, of it what the prefix cache supplied, and generated.
        miss: why the cache did not supply the rest (see ``Request``).
        chunks, preemptions, recomputed_tokens, drafts: see ``Request``.
        forked: the prompt was taken over from a sibling, not from the cache.
        blocks: its block table, empty unless it runs.
        arrived_at, scheduled_at, first_token_at, ended_at: ``time.monotonic()`` of when it was queued, first admitted,
            had a first token and ended; 0.0 where that did not happen.
    """

    state: str
    finish_reason: str | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    miss: str
    chunks: tuple[int, ...]
    preemptions: int
    recomputed_tokens: int
    drafts: SpeculationStats
    forked: bool
    blocks: tuple[int, ...]
    arrived_at: float
    scheduled_at: float
    first_token_at: float
    ended_at: float


@dataclass(frozen=True, slots=True)
class Report:
    """One request, as of one moment; of its n completions those that were queued.

    Attributes:
        id: as it was given.
        adapter: name of its adapter, None for the base model.
        opened_at: ``time.monotonic()`` of its arrival, and ``arrived`` the same in seconds since 1970.
        parts: its completions, none while it is being prepared.
    """

    id: str
    adapter: str | None
    opened_at: float
    arrived: float
    parts: tuple[Part, ...]


class Entry:
    """A request that has not ended.

    Attributes:
        id, adapter, opened_at, arrived: see ``Report``.
        requests: its engine requests, none while it is being prepared.
    """

    def __init__(self, id: str, adapter: str | None) -> None:
        self.id = id
        self.adapter = adapter
        self.opened_at = time.monotonic()
        self.arrived = time.time()
        self.requests: Sequence[Request] = ()
        self._answered: list[int] = []
        self._ends: list[tuple[str, float] | None] = []

    @property
    def has_ended(self) -> bool:
        """Whether all of its answer is there, though its client may not have taken it yet."""
        return bool(self.requests) and None not in self._ends

    @property
    def is_running(self) -> bool:
        """Whether the engine computes some of it."""
        return any(request.row >= 0 for request in self.requests)

    def queue(self, requests: Sequence[Request]) -> None:
        """It goes to the engine, as one request for each completion."""
        self.requests = requests
        self._answered = [0] * len(requests)
        self._ends = [None] * len(requests)

    def note(self, output: RequestOutput) -> None:
        """Some of its answer is there."""
        for new in output.outputs:
            self._answered[new.index] += len(new.token_ids)
            if new.finish_reason is not None:
                self._ends[new.index] = (new.finish_reason, time.monotonic())

    def report(self, end: FinishReason | None = None) -> Report:
        """What is known of it; with ``end``, completions that have not ended do now, for this reason."""
        parts = []
        for request, answered, noted in zip(self.requests, self._answered, self._ends, strict=True):
            # The engine may have generated more than was answered with: it hears of a stop string a step later.
            num_tokens = len(request.output) if noted is None else answered
            parts.append(_part(request, num_tokens, noted or _end_of(request, end)))
        return Report(self.id, self.adapter, self.opened_at, self.arrived, tuple(parts))


def _end_of(request: Request, end: FinishReason | None) -> tuple[str, float] | None:
    """Why and when a completion has ended whose answer is not handed out yet: it waits for its siblings."""
    if request.finish is not None:
        return request.finish.value, request.ended_at
    return None if end is None else (end.value, time.monotonic())


def _part(request: Request, num_tokens: int, ended: tuple[str, float] | None) -> Part:
    runs = ended is None and request.row >= 0
    return Part(
        state="finished" if ended is not None else "running" if runs else "waiting",
        finish_reason=None if ended is None else ended[0],
        prompt_tokens=len(request.prompt),
        cached_tokens=request.cached,
        output_tokens=num_tokens,
        miss=request.miss,
        chunks=tuple(request.chunks),
        preemptions=request.preemptions,
        recomputed_tokens=request.recomputed,
        drafts=request.speculation.copy(),
        forked=request.fork_of is not None and bool(request.scheduled_at) and not request.miss,
        blocks=tuple(request.blocks) if runs else (),
        arrived_at=request.arrived_at,
        scheduled_at=request.scheduled_at,
        first_token_at=request.first_token_at,
        ended_at=0.0 if ended is None else ended[1],
    )


class Journal:
    """Belongs to one event loop; the engine's thread may go on meanwhile.

    Attributes:
        entries: unfinished requests by id, in order of arrival.
        finished: the newest that have ended, the newest first. Those that never reached the engine are not kept.
    """

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.finished: deque[Report] = deque(maxlen=_MAX_FINISHED)

    def open(self, id: str, adapter: str | None = None) -> Entry:
        """A request has arrived."""
        entry = self.entries[id] = Entry(id, adapter)
        return entry

    def close(self, entry: Entry, end: FinishReason) -> None:
        """It has ended; completions that were not finished did for this reason."""
        del self.entries[entry.id]
        if entry.requests:
            self.finished.appendleft(entry.report(end))

    def preparing(self) -> list[Entry]:
        """Those that have arrived but are not queued yet."""
        return [entry for entry in self.entries.values() if not entry.requests]

    def newest_first(self) -> Iterator[Entry | Report]:
        """All: unfinished ones, then those that have ended."""
        yield from reversed(self.entries.values())
        yield from self.finished
