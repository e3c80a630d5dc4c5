"""The step loop: the only room that knows scheduler and runner.

One step is in flight while the host plans the next. The host plans by upper bound (a token being sampled counts as one
that will be there), the device keeps the tokens, and only ``_settle`` waits for it. Everything here runs on one thread;
other threads reach it through the inbox.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from jaxserve.errors import RequestError
from jaxserve.live import Recorder
from jaxserve.outputs import EngineStats, TokenEvent
from jaxserve.plan import NO_DRAFTS, StepPlan
from jaxserve.request import FinishReason, Request
from jaxserve.runner import Runner, StepHandle
from jaxserve.scheduler import Scheduler
from jaxserve.structured import step_mask
from jaxserve.timings import STEP_EDGES, Timings

__all__ = ["Engine", "StepClock"]

_IDLE_SECONDS = 0.001


@dataclass(slots=True)
class StepClock:
    """Where time and KV memory went since the last reset; seconds, and counts summed over steps.

    Attributes:
        steps, seconds, device_wait_seconds: steps, the time in them, and what of it the host waited for the device.
        tokens, padded_tokens: tokens computed, and the sizes of the buckets that held them.
        rows, most_rows: sequences that took part, in all and in the largest step.
        kv_tokens, kv_slots: tokens of those sequences that have KV after the step, and places in their blocks.
    """

    steps: int = 0
    seconds: float = 0.0
    device_wait_seconds: float = 0.0
    tokens: int = 0
    padded_tokens: int = 0
    rows: int = 0
    most_rows: int = 0
    kv_tokens: int = 0
    kv_slots: int = 0

    @property
    def host_seconds(self) -> float:
        """Time in which the host worked; the device may have been busy meanwhile."""
        return self.seconds - self.device_wait_seconds


@dataclass(frozen=True, slots=True)
class _StepSize:
    """Of the newest step, as in ``StepClock``."""

    tokens: int = 0
    padded_tokens: int = 0
    kv_tokens: int = 0
    kv_slots: int = 0
    drafts_per_row: float = 0.0


class Engine:
    """Takes requests, gives token events.

    Args:
        scheduler: decides what a step computes.
        runner: computes it.
        depth: how many steps may be in flight when the next one is planned: 1 overlaps host and device, 0 does not.

    Attributes:
        recorder: notes steps while somebody looks, None while nobody does; may be changed from any thread.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, *, depth: int) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.clock = StepClock()
        self.recorder: Recorder | None = None
        self._depth = depth
        self._inbox: deque[Request | tuple[str, FinishReason, str | None] | Callable[[], None]] = deque()
        self._in_flight: deque[StepHandle] = deque()
        self._step_sizes: Counter[int] = Counter()
        self._last = _StepSize()
        self._settled_at = 0.0
        self._alive_at = time.monotonic()
        self._step_seconds = {kind: Timings(STEP_EDGES) for kind in ("decode", "verify", "prefill", "mixed")}

    # ------------------------------------------------------------------ from any thread
    def add(self, requests: Iterable[Request]) -> None:
        """Queue requests."""
        self._note_alive()
        self._inbox.extend(requests)

    def finish(self, request_id: str, reason: FinishReason = FinishReason.ABORT, error: str | None = None) -> None:
        """End a request early: its client has gone, its text is complete, or ``error`` says why it cannot go on.

        Unknown ids are ignored.
        """
        self._note_alive()
        self._inbox.append((request_id, reason, error))

    def call(self, function: Callable[[], None]) -> None:
        """Have a function called between two steps, on the engine's thread."""
        self._note_alive()
        self._inbox.append(function)

    def _note_alive(self) -> None:
        if not self.has_work:  # the time without work says nothing
            self._alive_at = time.monotonic()

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has anything to do."""
        return bool(self._inbox or self._in_flight or self.scheduler.has_work)

    @property
    def has_news(self) -> bool:
        """Whether other threads have put something into the inbox."""
        return bool(self._inbox)

    def stats(self) -> EngineStats:
        """Counts at this moment; may be read from any thread."""
        scheduler, blocks = self.scheduler, self.scheduler.blocks
        last = self._last  # once: the engine's thread replaces it
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_blocks=blocks.num_blocks - 1,
            num_free_blocks=blocks.num_free,
            num_cached_blocks=blocks.pool.num_cached,
            prefix_queries_total=blocks.prefix_queries_total,
            prefix_hits_total=blocks.prefix_hits_total,
            prefix_misses=dict(blocks.prefix_misses),
            preemptions_total=scheduler.preemptions_total,
            recomputed_tokens_total=blocks.recomputed_tokens_total,
            prompt_tokens_total=scheduler.prompt_tokens_total,
            generation_tokens_total=scheduler.generation_tokens_total,
            steps_total=self.scheduler.steps_total,
            last_step_age=time.monotonic() - self._alive_at if self.has_work else 0.0,
            step_seconds=self._step_seconds,
            step_sizes=dict(self._step_sizes),
            runtime_compiles_total=self.runner.compiles.count,
            last_step_tokens=last.tokens,
            last_step_padded=last.padded_tokens,
            last_step_kv_tokens=last.kv_tokens,
            last_step_kv_slots=last.kv_slots,
            last_step_drafts=last.drafts_per_row,
            speculation=scheduler.speculation.stats.copy(),
        )

    # ------------------------------------------------------------------ on the engine's thread
    def step(self) -> list[TokenEvent]:
        """Dispatch the next step, read the previous one, and return what is new."""
        began = time.perf_counter()
        if not self._in_flight:
            self._settled_at = began
        with self.runner.compiles:
            events = self.take_in()
            plan = self.scheduler.plan()
            launch = self.runner.forward(plan)
            events += self._settle(0)
            mask = self._mask(plan)
            events += self._give_up(plan)
            if plan:
                self._in_flight.append(self.runner.sample(launch, mask))
                self._note(plan, launch.padded_tokens)
            events += self._settle(self._depth)
        if not plan and not events and self.scheduler.has_work:  # whoever waits, waits for another thread
            time.sleep(_IDLE_SECONDS)
        self.clock.seconds += time.perf_counter() - began
        self._alive_at = time.monotonic()
        return events

    def abandon(self) -> None:
        """Drop all requests and steps, after a step failed or was interrupted at any point."""
        self._inbox.clear()
        self._in_flight.clear()
        self.scheduler.abandon()
        # Blocks are published when a step is planned: those of one that was never dispatched hold nothing.
        self.scheduler.blocks.reset_prefix_cache()

    def take_in(self) -> list[TokenEvent]:
        """Read the inbox, and compute nothing: what ends by it is all that is new."""
        events = []
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, Request):
                try:
                    self.scheduler.add(item)
                except RequestError as error:
                    events.append(TokenEvent(item.id, finish=FinishReason.ERROR, error=str(error)))
            elif callable(item):
                item()
            elif (event := self.scheduler.abort(*item[:2])) is not None:
                events.append(replace(event, error=item[2]))
        return events

    def _settle(self, leave: int) -> list[TokenEvent]:
        """Read the oldest steps until ``leave`` are in flight."""
        events = []
        while len(self._in_flight) > leave:
            handle = self._in_flight.popleft()
            began = time.perf_counter()
            result = handle.result()
            now = time.perf_counter()
            self.clock.device_wait_seconds += now - began
            self._step_seconds[kind := handle.plan.kind].add(seconds := now - self._settled_at)
            if (recorder := self.recorder) is not None:  # once: others take it away
                recorder.note_step(handle.plan, kind, handle.padded_tokens, seconds)
            if all(len(row.tokens) == 1 for row in handle.plan.rows):
                # While steps follow each other without a gap, one is done when the device begins the next.
                self.scheduler.speculation.note_step(handle.padded_tokens, seconds, proposes=handle.plan.proposes)
            self._settled_at = now
            for event in self.scheduler.update(handle.plan, result):
                request = self.scheduler.get(event.request_id)
                if request is not None and request.constraint is not None:
                    request.constraint.advance(event.token_ids)
                events.append(event)
        return events

    def _mask(self, plan: StepPlan) -> NDArray[np.uint32] | None:
        rows = []
        for row in plan.rows:
            if row.samples:
                request = self.scheduler.get(row.request_id)
                constraint, drafts = (request.constraint, request.drafts) if request is not None else (None, NO_DRAFTS)
                rows.append((constraint, row.num_drafts, drafts))
        return step_mask(rows, self.runner.config.vocab_size)

    def _give_up(self, plan: StepPlan) -> list[TokenEvent]:
        """End requests whose constraint cannot be followed any further."""
        events = []
        for row in plan.rows:
            request = self.scheduler.get(row.request_id) if row.samples else None
            if request is not None and request.constraint is not None and (why := request.constraint.error):
                event = self.scheduler.abort(request.id, FinishReason.ERROR)
                if event is not None:
                    events.append(replace(event, error=f"structured_outputs: {why}"))
        return events

    def _note(self, plan: StepPlan, padded_tokens: int) -> None:
        clock, num_rows = self.clock, len(plan.rows)
        kv_tokens = sum(row.start + row.num_tokens for row in plan.rows)
        kv_slots = sum(len(row.block_ids) for row in plan.rows) * self.scheduler.blocks.block_size
        self._step_sizes[plan.num_tokens] += 1
        drafts = sum(row.num_drafts for row in plan.rows) / num_rows
        self._last = _StepSize(plan.num_tokens, padded_tokens, kv_tokens, kv_slots, drafts)
        clock.steps += 1
        clock.tokens += plan.num_tokens
        clock.padded_tokens += padded_tokens
        clock.rows += num_rows
        clock.most_rows = max(clock.most_rows, num_rows)
        clock.kv_tokens += kv_tokens
        clock.kv_slots += kv_slots
