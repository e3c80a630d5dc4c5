"""The device side of a step: plans in, handles out.

``forward`` and ``sample`` only dispatch; nothing here waits for the device. The runner reads a plan and never sees a
request, and all that lives on the device is in its ``DeviceState``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxserve.layers import KVCache
from jaxserve.models.config import ModelConfig
from jaxserve.plan import BlockCopy, RowPlan, StepPlan
from jaxserve.runner import programs
from jaxserve.runner.batch import StepInput, make_step_input, order_rows
from jaxserve.runner.buckets import Bucket, Buckets
from jaxserve.runner.compiled import CompileCounter, Programs
from jaxserve.runner.handle import StepHandle
from jaxserve.runner.state import DeviceState
from jaxserve.sampling import RowState, history_counts, make_sampling_input

__all__ = ["Launch", "Runner", "RunnerShape"]

_COPIES = 16  # block copies per call of the copy program


@dataclass(frozen=True, slots=True)
class RunnerShape:
    """Sizes that a runner is compiled for.

    Attributes:
        num_blocks, block_size: the KV pools.
        max_context: longest context, tokens.
        max_tokens, max_rows: most tokens and rows of a step.
        dtype: of the KV pools.
        backend: attention backend.
    """

    num_blocks: int
    block_size: int
    max_context: int
    max_tokens: int
    max_rows: int
    dtype: jnp.dtype
    backend: str

    @property
    def max_blocks(self) -> int:
        """Blocks per row."""
        return -(-self.max_context // self.block_size)


@dataclass(frozen=True, slots=True)
class Launch:
    """A dispatched forward pass: the plan's rows in the step's order, and their hidden states on the device."""

    plan: StepPlan
    ordered: list[RowPlan]
    hidden: jax.Array | None
    padded_tokens: int


class Runner:
    """Runs plans on the device.

    Args:
        params: the model's parameters, placed.
        config: the model.
        shape: the sizes to compile for.
    """

    def __init__(self, params: dict[str, Any], config: ModelConfig, shape: RunnerShape) -> None:
        self.config = config
        self.shape = shape
        self.buckets = Buckets(shape.max_tokens, shape.max_rows)
        self.compiles = CompileCounter()
        self.params = params
        self._head = {name: params[name] for name in ("embed", "lm_head") if name in params}
        pool = (shape.num_blocks, shape.block_size, config.num_kv_heads, config.head_dim)
        self._state = DeviceState(
            kv=KVCache.zeros(config.num_layers, pool, shape.dtype),
            rows=RowState.zeros(shape.max_rows, config.vocab_size),
        )
        words = -(-config.vocab_size // 32)
        # On the device once, so that steps without constraints transfer no mask.
        self._no_mask = {
            rows: jax.device_put(np.full((rows, words), 2**32 - 1, np.uint32)) for rows in self.buckets.rows
        }
        self._hidden = jax.ShapeDtypeStruct((shape.max_rows, config.hidden_size), params["embed"].dtype)
        self._forward = Programs(self._lower_forward)
        self._sample = Programs(self._lower_sample)
        self._rare = Programs(self._lower_rare)

    # ------------------------------------------------------------------ one step
    def forward(self, plan: StepPlan) -> Launch:
        """Dispatch a plan's block copies and its forward pass. Nothing for an empty plan."""
        self._copy_blocks(plan.copies)
        if not plan:
            return Launch(plan, [], None, 0)
        ordered = order_rows(plan)
        for row in ordered:
            if row.fresh:
                self._load_row(row)
        bucket = self.buckets.pick(
            plan.num_tokens, len(ordered), has_prefill=any(row.num_tokens > 1 for row in ordered)
        )
        kv, hidden = self._forward[bucket](
            self.params, self._state.kv, self._state.rows.last_token, self._step_input(ordered, bucket)
        )
        self._state = replace(self._state, kv=kv)
        return Launch(plan, ordered, hidden, bucket.tokens)

    def sample(self, launch: Launch, mask: NDArray[np.uint32] | None) -> StepHandle:
        """Dispatch sampling of a launch's rows.

        ``mask`` [len(plan.rows), ceil(V / 32)] holds the legal tokens of each row of the plan; None allows all.
        """
        at = [i for i, row in enumerate(launch.ordered) if row.samples]
        order = [launch.ordered[i] for i in at]
        if not order:
            return StepHandle(launch.plan, order, None)
        size = self.buckets.pick_rows(len(order))
        index = np.zeros(size, np.int32)
        index[: len(at)] = at
        bits, masked = self._mask(launch.plan, order, mask, size)
        rows, sampled = self._sample[size](
            self._head,
            self._state.rows,
            launch.hidden,
            index,
            make_sampling_input(order, size, self.shape.max_rows),
            bits,
            masked,
        )
        self._state = replace(self._state, rows=rows)
        return StepHandle(launch.plan, order, sampled)

    def wait(self) -> None:
        """Wait until the device has done all that was dispatched."""
        jax.block_until_ready((self.params, self._state))

    def close(self) -> None:
        """Free what the runner holds on the device. It is of no use afterwards."""
        self.wait()
        self.compiles.close()
        for leaf in jax.tree.leaves((self._state, self._no_mask, self.params)):
            leaf.delete()

    # ------------------------------------------------------------------ warm-up
    def programs(self) -> list[tuple[Programs, Any]]:
        """Every program that serving may call, as (programs, key), the smallest first."""
        forward = [(self._forward, bucket) for bucket in self.buckets.forward()]
        sample = [(self._sample, rows) for rows in self.buckets.rows]
        return [*forward, *sample, (self._rare, "copy"), (self._rare, "load")]

    # ------------------------------------------------------------------ parts
    def _step_input(self, ordered: list[RowPlan], bucket: Bucket) -> StepInput:
        return make_step_input(ordered, bucket, max_blocks=self.shape.max_blocks, dummy_row=self.shape.max_rows)

    def _copy_blocks(self, copies: tuple[BlockCopy, ...]) -> None:
        # No target is the source of a later copy (see blocks.manager), so batches may follow each other.
        for first in range(0, len(copies), _COPIES):
            batch = copies[first : first + _COPIES]
            source, target = np.zeros(_COPIES, np.int32), np.zeros(_COPIES, np.int32)
            source[: len(batch)] = [copy.source for copy in batch]
            target[: len(batch)] = [copy.target for copy in batch]
            self._state = replace(self._state, kv=self._rare["copy"](self._state.kv, source, target))

    def _load_row(self, row: RowPlan) -> None:
        if not (row.params.penalised or row.params.logit_bias):
            return
        bias = np.zeros(self.config.vocab_size, np.float32)
        for token, value in row.params.logit_bias.items():
            bias[token] = value
        counts = history_counts(row, self.config.vocab_size)
        rows = self._rare["load"](self._state.rows, np.int32(row.row), counts, bias)
        self._state = replace(self._state, rows=rows)

    def _mask(
        self, plan: StepPlan, order: list[RowPlan], mask: NDArray[np.uint32] | None, size: int
    ) -> tuple[Any, np.bool_]:
        if mask is None:
            return self._no_mask[size], np.bool_(False)
        index = {row.request_id: i for i, row in enumerate(plan.rows)}
        bits = np.full((size, mask.shape[1]), 2**32 - 1, np.uint32)
        bits[: len(order)] = mask[[index[row.request_id] for row in order]]
        return bits, np.bool_(True)

    # ------------------------------------------------------------------ lowering
    def _lower_forward(self, bucket: Bucket) -> jax.stages.Lowered:
        function = partial(
            programs.forward,
            config=self.config,
            has_prefill=bucket.has_prefill,
            max_rows=self.shape.max_rows,
            backend=self.shape.backend,
        )
        step = self._step_input([], bucket)
        return jax.jit(function, donate_argnums=1).lower(self.params, self._state.kv, self._state.rows.last_token, step)

    def _lower_sample(self, rows: int) -> jax.stages.Lowered:
        return jax.jit(programs.sample, donate_argnums=1).lower(
            self._head,
            self._state.rows,
            self._hidden,
            np.zeros(rows, np.int32),
            make_sampling_input([], rows, self.shape.max_rows),
            self._no_mask[rows],
            np.bool_(False),
        )

    def _lower_rare(self, name: str) -> jax.stages.Lowered:
        if name == "copy":
            pairs = np.zeros(_COPIES, np.int32)
            return jax.jit(programs.copy_blocks, donate_argnums=0).lower(self._state.kv, pairs, pairs)
        vocab = self.config.vocab_size
        return jax.jit(programs.load_row, donate_argnums=0).lower(
            self._state.rows, np.int32(0), np.zeros(vocab, np.int16), np.zeros(vocab, np.float32)
        )
