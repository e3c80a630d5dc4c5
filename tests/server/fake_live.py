"""What the fake engine shows of itself: real block tables in a real pool, filled by what its requests have said."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count

from jaxserve.blocks import BlockPool
from jaxserve.live import EngineShape, Journal, RequestRow, Snapshot, StepRow, Table
from jaxserve.outputs import EngineStats
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams

SHAPE = EngineShape(16, 100, 4096, 64, 512, 2, 1, 4, 4, 8192, speculates=True)


class FakeLive:
    """See ``jaxserve.server.protocol.LiveEngine``: a step is made for every snapshot.

    Attributes:
        requests: those that run or wait, in order of arrival.
        num_watchers, num_snapshots: how many look, and how many snapshots were taken.
    """

    shape = SHAPE

    def __init__(self, stats: Callable[[], EngineStats], check: Callable[[], None]) -> None:
        self.journal = Journal()
        self.requests: dict[str, Request] = {}
        self.num_watchers = 0
        self.num_snapshots = 0
        self._stats = stats
        self._check = check
        self._pool = BlockPool(SHAPE.num_blocks + 1, SHAPE.block_size)
        self._keys = count(2)
        self._key_of: dict[str, int] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        self.num_watchers += 1
        try:
            yield
        finally:
            self.num_watchers -= 1

    def make(self, request_id: str, ids: list[int], params: SamplingParams) -> list[Request]:
        """The requests of ``params.n`` completions."""
        made = [
            Request(f"{request_id}#{i}", ids, params, i, frozenset(), SHAPE.num_blocks * 16) for i in range(params.n)
        ]
        self.requests.update((request.id, request) for request in made)
        return made

    def begin(self, request: Request) -> None:
        """It runs, and has computed its prompt."""
        request.row, request.scheduled_at, request.cached, request.miss = 0, time.monotonic(), 0, "cold"
        request.owed = request.computed = len(request.prompt)
        request.chunks = [len(request.prompt)]

    def say(self, request: Request, token: int) -> None:
        """It has one more token."""
        request.first_token_at = request.first_token_at or time.monotonic()
        request.output.append(token)
        request.speculation.note(2, 1)

    def end(self, request: Request) -> None:
        """It gives its blocks back."""
        self._pool.release(request.blocks)
        request.blocks, request.row = [], -1
        self.requests.pop(request.id, None)

    async def snapshot(self) -> Snapshot:
        self._check()
        self.num_snapshots += 1
        running = [request for request in self.requests.values() if request.row >= 0]
        for request in running:
            wanted = -(-request.known // SHAPE.block_size) - len(request.blocks)
            request.blocks += self._pool.take(min(wanted, self._pool.num_free))
        refs, published = self._pool.state()
        now = time.monotonic()
        step = StepRow(now, 0.01, "decode", 0, len(running), 0, 1, len(running))
        return Snapshot(
            taken_at=now,
            refs=refs,
            published=published,
            tables=tuple(Table(self._key(r), r.blocks, len(r.blocks)) for r in running),
            requests=tuple(map(self._row, self.requests.values())),
            num_requests=len(self.requests),
            steps=(step,),
            num_steps=self.num_snapshots,
            stats=self._counted(),
            ttft=(0.1, 0.2, 0.3),
            itl=(0.01, 0.02),
        )

    def _counted(self) -> EngineStats:
        return replace(self._stats(), num_free_blocks=self._pool.num_free, num_cached_blocks=0)

    def _key(self, request: Request) -> int:
        if request.id not in self._key_of:
            self._key_of[request.id] = next(self._keys)
        return self._key_of[request.id]

    def _row(self, request: Request) -> RequestRow:
        return RequestRow(
            request.id.rpartition("#")[0],
            self._key(request),
            "running" if request.row >= 0 else "waiting",
            len(request.prompt),
            request.cached,
            request.known,
            len(request.output),
            len(request.blocks),
            0,
            request.arrived_at,
            request.scheduled_at,
        )
