"""The runner's hand for speculation: it keeps the drafts, and what the proposer remembers, from step to step.

A proposer with a KV cache of its own sees every token once. In steps that propose, ``propose`` shows it the newest
ones and ``observe`` those of prompts; rows of other steps fall behind, and are caught up with when they are needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from jaxserve.plan import RowPlan
from jaxserve.runner import programs
from jaxserve.runner.batch import StepInput, make_step_input, pad_tables
from jaxserve.runner.buckets import Bucket, Buckets
from jaxserve.runner.compiled import Programs
from jaxserve.sampling import RowState, split_seeds
from jaxserve.speculative import DraftState, Proposal, ProposeInput, Proposer

__all__ = ["COPIES", "Drafter"]

COPIES = 16
"""Block copies per call of a copy program."""

_ALL = np.int32(2**31 - 1)  # more tokens than any row has


class Drafter:
    """Proposes, on the device.

    Args:
        proposer: guesses tokens ahead.
        params: its parameters.
        like: state of the rows, hidden states of places, and those that the KV cache keeps, or their shapes.
        buckets: sizes of steps.
        pool: number and size of the KV blocks.
        max_blocks: most blocks of a row.
    """

    def __init__(
        self,
        proposer: Proposer,
        params: Any,
        like: tuple[Any, Any, Any],
        buckets: Buckets,
        pool: tuple[int, int],
        max_blocks: int,
    ) -> None:
        self.params = params
        self.drafts = DraftState.empty(buckets.max_rows, proposer.num_drafts, is_tree=proposer.is_tree)
        self.state = proposer.initial(buckets.max_rows, *pool)
        self._proposer = proposer
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), like)
        self._rows, self._hidden, self._states = shapes
        self._buckets = buckets
        self._max_blocks = max_blocks
        self._behind: dict[int, int] = {}  # first position that a row has not shown
        self._programs = Programs(self._lower)

    def programs(self) -> Iterator[tuple[Programs, Any]]:
        """Every program that serving may call, as (programs, key)."""
        if self._proposer.num_drafts:
            yield self._programs, "start"
            yield from ((self._programs, rows) for rows in self._buckets.rows)
        if self._proposer.has_cache:
            yield self._programs, "copy"
            yield from ((self._programs, bucket) for bucket in self._buckets.forward() if bucket.has_prefill)

    def copy(self, source: NDArray[np.int32], target: NDArray[np.int32]) -> None:
        """Copy blocks source [COPIES] over blocks target [COPIES]."""
        if self._proposer.has_cache:
            self.state = self._programs["copy"](self.state, source, target)

    def start(self, row: RowPlan, rows: RowState) -> RowState:
        """A row was given to a request: drop what is known of the one before. Returns the rows with its history."""
        if not self._proposer.num_drafts:
            return rows
        self._behind.pop(row.row, None)
        history = np.zeros(rows.history.shape[1], np.int32)
        history[: len(row.history)] = row.history[: len(history)]
        rows, self.drafts, self.state = self._programs["start"](
            rows, self.drafts, self.state, np.int32(row.row), history, _known(row)
        )
        return rows

    def skip(self, ordered: Sequence[RowPlan]) -> None:
        """A step has ended in which nothing is proposed."""
        if self._proposer.has_cache:
            for row in ordered:
                # Drafts in flight count in its start, maybe too many.
                self._behind.setdefault(row.row, max(0, row.start - self._buckets.queries))

    def propose(
        self,
        ordered: Sequence[RowPlan],
        bucket: Bucket,
        step: StepInput | None,
        rows: RowState,
        hidden: jax.Array | None,
        states: jax.Array | None,
    ) -> Proposal | None:
        """Propose what follows the rows of a step that has just been sampled: the drafts of those that sample.

        ``hidden`` [max_places, E] is what the model had to say at each place, ``states`` what the KV cache keeps.
        """
        if self._proposer.has_cache:
            self._catch_up(ordered, rows, states)
            if bucket.has_prefill:
                self.state = self._programs[bucket](self.params, self.state, rows, step, states)
        sampling = [row for row in ordered if row.samples]
        if not sampling:
            return None
        size = self._buckets.pick_rows(len(sampling))
        self.drafts, self.state, proposed = self._programs[size](
            self.params, self.drafts, self.state, rows, self._work(sampling, size, hidden, states)
        )
        return proposed

    def arrays(self) -> Any:
        """All that it holds on the device."""
        return self.drafts, self.state, self.params

    def _work(self, sampling: Sequence[RowPlan], size: int, hidden: Any, states: Any) -> ProposeInput:
        at = np.full(size, self._buckets.max_rows, np.int32)
        seeds, temperature = np.zeros(size, np.uint64), np.zeros(size, np.float32)
        for i, row in enumerate(sampling):
            at[i] = row.row
            seeds[i] = row.seed & (2**64 - 1)
            temperature[i] = row.params.temperature
        tables, is_real = pad_tables(sampling, size, self._max_blocks), np.arange(size) < len(sampling)
        return ProposeInput(at, is_real, tables, split_seeds(seeds), temperature, hidden, states)

    def _catch_up(self, ordered: Sequence[RowPlan], rows: RowState, states: jax.Array | None) -> None:
        """Show what the rows of a step computed in steps without proposals."""
        budget = self._buckets.mixed_tokens[-1]
        for row in ordered:
            start = self._behind.pop(row.row, row.start)
            while start < row.start:  # no drafts were in flight, so this is exact
                count = min(row.start - start, budget)
                part = replace(row, start=start, num_tokens=count, tokens=(0,) * count, num_drafts=0, samples=False)
                bucket = self._buckets.pick(count, 1, has_prefill=True)
                self.state = self._programs[bucket](self.params, self.state, rows, self._step([part], bucket), states)
                start += count

    def _step(self, ordered: list[RowPlan], bucket: Bucket) -> StepInput:
        return make_step_input(ordered, bucket, max_blocks=self._max_blocks, buckets=self._buckets)

    # ------------------------------------------------------------------ lowering
    def _lower(self, key: Any) -> jax.stages.Lowered:
        if isinstance(key, Bucket):
            observe = partial(programs.observe, proposer=self._proposer, bucket=key)
            return jax.jit(observe, donate_argnums=1).lower(
                self.params, self.state, self._rows, self._step([], key), self._states
            )
        if key == "copy":
            pairs = np.zeros(COPIES, np.int32)
            return jax.jit(self._proposer.copy, donate_argnums=0).lower(self.state, pairs, pairs)
        if key == "start":
            history = np.zeros(self._rows.history.shape[1], np.int32)
            start = jax.jit(partial(programs.start_row, proposer=self._proposer), donate_argnums=(0, 1, 2))
            known = (np.int32(0), np.int32(0))
            return start.lower(self._rows, self.drafts, self.state, np.int32(0), history, known)
        propose = partial(programs.propose, proposer=self._proposer)
        return jax.jit(propose, donate_argnums=(1, 2)).lower(
            self.params, self.drafts, self.state, self._rows, self._work([], key, self._hidden, self._states)
        )


def _known(row: RowPlan) -> tuple[np.int32, np.int32]:
    """How many tokens the request of a fresh row begins with, and how many of all are its own alone."""
    count = np.int32(len(row.history))
    return count, _ALL if row.private else count
