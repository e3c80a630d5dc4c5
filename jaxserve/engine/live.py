"""What an ``AsyncLLM`` shows of itself: its shape, its requests, and snapshots while somebody looks."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from jaxserve.engine.engine import Engine
from jaxserve.engine.output import OutputProcessor
from jaxserve.engine.startup import Started
from jaxserve.live import MAX_REQUESTS, EngineShape, Entry, Journal, Latency, Recorder, RequestRow, Snapshot

__all__ = ["LiveEngine"]


class LiveEngine:
    """Belongs to the event loop.

    Args:
        started: the engine and its model.
        output: what turns events into answers.
        ask: has a function called between two steps and returns its result; EngineDeadError if there are no more steps.

    Attributes:
        shape: what never changes.
        journal: every request.
    """

    def __init__(
        self,
        started: Started,
        output: OutputProcessor,
        ask: Callable[[Callable[[], Snapshot]], Coroutine[Any, Any, Snapshot]],
    ) -> None:
        self.shape = _shape_of(started)
        self.journal = Journal()
        self._engine: Engine = started.engine
        self._output = output
        self._ask = ask
        self._num_watchers = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While this is open by anybody, steps and waits are noted, and snapshots can be taken."""
        self._num_watchers += 1
        if self._num_watchers == 1:
            self._engine.recorder = Recorder(self._engine.scheduler)
            self._output.latency = Latency()
        try:
            yield
        finally:
            self._num_watchers -= 1
            if not self._num_watchers:
                self._engine.recorder = None
                self._output.latency = None

    async def snapshot(self) -> Snapshot:
        """This moment, or the end of the step that is being made. EngineDeadError: the engine has stopped."""
        recorder, latency = self._engine.recorder, self._output.latency
        assert recorder is not None, "nobody has said that they look"
        assert latency is not None, "nobody has said that they look"
        taken = await self._ask(lambda: recorder.take(self._engine.stats()))
        preparing = self.journal.preparing()
        rows = [*map(self._named, taken.requests), *map(_preparing, preparing)]
        ttft, itl = latency.recent(time.monotonic())
        return replace(
            taken,
            requests=tuple(rows[:MAX_REQUESTS]),
            num_requests=taken.num_requests + len(preparing),
            num_preparing=len(preparing),
            ttft=ttft,
            itl=itl,
        )

    def _named(self, row: RequestRow) -> RequestRow:
        """With the user's name of the request, and of its adapter."""
        id = row.id.rpartition("#")[0]
        entry = self.journal.entries.get(id)
        return row._replace(id=id, adapter=None if entry is None else entry.adapter)


def _preparing(entry: Entry) -> RequestRow:
    return RequestRow(entry.id, 0, "preparing", 0, 0, 0, 0, 0, 0, entry.opened_at, 0.0, entry.adapter)


def _shape_of(started: Started) -> EngineShape:
    runner, model, config = started.engine.runner, started.model_config, started.config
    blocks = started.engine.scheduler.blocks
    return EngineShape(
        block_size=blocks.block_size,
        num_blocks=blocks.num_blocks - 1,
        block_bytes=runner.block_bytes,
        max_num_seqs=runner.shape.max_rows,
        max_num_batched_tokens=runner.shape.max_tokens,
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        kv_dtype_bytes=np.dtype(runner.shape.dtype).itemsize,
        weight_bytes=runner.weight_bytes,
        kv_reservation=config.cache.kv_reservation,
        prefix_caching=config.cache.enable_prefix_caching,
        speculates=config.speculative.is_asked,
    )
