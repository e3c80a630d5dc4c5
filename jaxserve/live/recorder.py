"""What is noted on the engine's thread while somebody looks; there is none while nobody does.

A step costs a pass over its rows, and a snapshot one over the running requests and a copy of flat memory, however many
look at it.
"""

from __future__ import annotations

import time
from collections import deque
from itertools import chain, islice

from jaxserve.live.snapshot import MAX_REQUESTS, MAX_STEPS, RequestRow, Snapshot, StepRow, Table
from jaxserve.outputs import EngineStats
from jaxserve.plan import StepPlan
from jaxserve.request import Request
from jaxserve.scheduler import Scheduler

__all__ = ["Recorder"]

_FIRST_KEY, _LAST_KEY = 2, 2**16 - 1
"""Of requests on the map: one number in 16 bits; 0 and 1 stand for blocks that nobody uses."""


class Recorder:
    """Belongs to the thread on which ``scheduler`` plans."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._steps: deque[StepRow] = deque(maxlen=MAX_STEPS)
        self._num_steps = 0
        self._keys: dict[str, int] = {}
        self._newest_key = _FIRST_KEY - 1

    def note_step(self, plan: StepPlan, kind: str, padded_tokens: int, seconds: float) -> None:
        """A step is done, which took so long."""
        prefill = decode = verify = 0
        for row in plan.rows:
            if row.num_drafts:
                verify += row.num_tokens
            elif row.num_tokens == 1:
                decode += 1
            else:
                prefill += row.num_tokens
        padding = padded_tokens - (prefill + decode + verify)
        now = time.monotonic()
        self._steps.append(StepRow(now, seconds, kind, prefill, decode, verify, padding, len(plan.rows)))
        self._num_steps += 1

    def take(self, stats: EngineStats) -> Snapshot:
        """This moment; ``stats`` are of the same."""
        running, waiting = self._scheduler.queues
        listed = islice(waiting, max(0, MAX_REQUESTS - len(running)))
        self._give_keys([request.id for request in chain(running, listed)])
        refs, published = self._scheduler.blocks.pool.state()
        return Snapshot(
            taken_at=time.monotonic(),
            refs=refs,
            published=published,
            tables=tuple(Table(self._keys[r.id], r.blocks, len(r.blocks)) for r in running),
            requests=tuple(map(self._row, islice(chain(running, waiting), MAX_REQUESTS))),
            num_requests=len(running) + len(waiting),
            steps=tuple(self._steps),
            num_steps=self._num_steps,
            stats=stats,
        )

    def _row(self, request: Request) -> RequestRow:
        return RequestRow(
            request.id,
            self._keys[request.id],
            "waiting" if request.row < 0 else "running",
            len(request.prompt),
            request.cached,
            min(request.computed, request.known),
            len(request.output),
            len(request.blocks),
            request.preemptions,
            request.arrived_at,
            request.scheduled_at,
        )

    def _give_keys(self, ids: list[str]) -> None:
        """A key for each request; those that are not listed give theirs back, and the oldest is used again first."""
        known = self._keys
        self._keys = {id: known[id] for id in ids if id in known}
        taken = set(self._keys.values())
        for id in ids:
            if id not in self._keys:
                while True:
                    self._newest_key = self._newest_key + 1 if self._newest_key < _LAST_KEY else _FIRST_KEY
                    if self._newest_key not in taken:
                        break
                self._keys[id] = self._newest_key
                taken.add(self._newest_key)
