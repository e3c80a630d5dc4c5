"""The device side of a step: plans in, handles out.

``forward`` and ``sample`` only dispatch; nothing here waits for the device. The runner reads a plan and never sees a
request, and all that lives on the device is in its ``DeviceState``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxserve.layers import KVCache
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import state_size
from jaxserve.plan import BlockCopy, RowPlan, StepPlan
from jaxserve.runner import programs
from jaxserve.runner.adapters import Adapters
from jaxserve.runner.batch import StepInput, make_step_input, order_rows
from jaxserve.runner.buckets import NO_BUCKET, Bucket, Buckets
from jaxserve.runner.compaction import Compactor
from jaxserve.runner.compiled import CompileCounter, Programs
from jaxserve.runner.drafter import COPIES, Drafter
from jaxserve.runner.handle import StepHandle
from jaxserve.runner.programs import Newest
from jaxserve.runner.reader import PromptParts, PromptReader
from jaxserve.runner.state import DeviceState
from jaxserve.sampling import RowState, history_counts, make_sampling_input
from jaxserve.speculative import NoProposer, Proposer, TypicalAcceptance

__all__ = ["Launch", "Runner", "RunnerShape"]


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
    """A dispatched forward pass: rows in the step's order, hidden states on the device, what it ran with and read."""

    plan: StepPlan
    ordered: list[RowPlan] = field(default_factory=list)
    hidden: jax.Array | None = None
    bucket: Bucket = NO_BUCKET
    step: StepInput | None = None
    parts: PromptParts | None = None

    @property
    def padded_tokens(self) -> int:
        """Size of its bucket, 0 for an empty plan."""
        return self.bucket.tokens


class Runner:
    """Runs plans on the device.

    Args:
        params: the model's parameters, placed.
        config: the model.
        shape: the sizes to compile for.
        proposer: guesses tokens ahead.
        proposer_params: its parameters.
        typical: which drafts count as right although something else was sampled; None for exact acceptance.
        adapters: those of requests; proposers know nothing of them.
    """

    def __init__(
        self,
        params: dict[str, Any],
        config: ModelConfig,
        shape: RunnerShape,
        proposer: Proposer | None = None,
        proposer_params: Any = None,
        typical: TypicalAcceptance | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self.config = config
        self.shape = shape
        self.proposer = proposer = proposer or NoProposer()
        self.buckets = Buckets(shape.max_tokens, shape.max_rows, proposer.num_drafts)
        self.compiles = CompileCounter()
        self.params = params
        self._taps = proposer.taps or ()
        self._head: dict[str, Any] = {name: params[name] for name in ("embed", "lm_head") if name in params}
        pool = (shape.num_blocks, shape.block_size, config.num_kv_heads, config.head_dim)
        self._state = DeviceState(
            kv=KVCache.zeros(config.num_layers, pool, shape.dtype, state_size=state_size(config, proposer.taps)),
            rows=RowState.zeros(
                shape.max_rows,
                config.vocab_size,
                history=shape.max_context if proposer.num_drafts else 0,
                max_depth=proposer.max_depth,
            ),
        )
        words = -(-config.vocab_size // 32)
        # On the device once, so that steps without constraints transfer no mask.
        self._no_mask = {
            places: jax.device_put(np.full((places, words), 2**32 - 1, np.uint32)) for places in self.buckets.places
        }
        self._hidden = jax.ShapeDtypeStruct((self.buckets.max_places, config.hidden_size), params["embed"].dtype)
        pools = (shape.num_blocks, shape.block_size)
        like = (self._state.rows, self._hidden, self._state.kv.states)
        self._drafter = Drafter(proposer, proposer_params, like, self.buckets, pools, shape.max_blocks)
        self._compactor = Compactor(
            (self._state.kv, self._state.rows),
            self.buckets,
            shape.max_blocks,
            backend=shape.backend,
            is_tree=proposer.is_tree,
        )
        self._typical = typical
        self.adapters = adapters or Adapters()
        self._reader = PromptReader(self._head, self._hidden, self.adapters)
        self._forward = Programs(self._lower_forward)
        self._forward_adapted = Programs(partial(self._lower_forward, adapted=True))
        self._sample = Programs(self._lower_sample)
        self._sample_adapted = Programs(partial(self._lower_sample, adapted=True))
        self._rare = Programs(self._lower_rare)

    # ------------------------------------------------------------------ one step
    def forward(self, plan: StepPlan) -> Launch:
        """Dispatch a plan's block copies and its forward pass. Nothing for an empty plan."""
        self._copy_blocks(plan.copies)
        if not plan:
            return Launch(plan)
        ordered = order_rows(plan, self.buckets.queries)
        for row in ordered:
            if row.fresh:
                self._load_row(row)
        has_prefill = any(len(row.tokens) > 1 for row in ordered)
        bucket = self.buckets.pick(plan.num_tokens, len(ordered), has_prefill=has_prefill)
        step = self._step_input(ordered, bucket)
        lora = self.adapters.of_rows(ordered, bucket.rows)
        forward = self._forward if lora is None else self._forward_adapted
        kv, hidden, chunks = forward[bucket](self.params, self._state.kv, self._newest(), step, lora)
        self._state = replace(self._state, kv=kv)
        parts = self._reader.read(ordered, step.query_start, chunks)
        return Launch(plan, ordered, hidden, bucket, step, parts)

    def sample(self, launch: Launch, mask: NDArray[np.uint32] | None) -> StepHandle:
        """Dispatch sampling of a launch's rows, and proposing what may follow.

        ``mask`` [P, ceil(V / 32)] holds the legal tokens of each place (one of each row of the plan that samples, and
        one of each of its drafts, in the order of the plan); None allows all.
        """
        plan, padded_tokens = launch.plan, launch.padded_tokens
        order = [row for row in launch.ordered if row.samples]
        sampled = reached = None
        if order:
            size = self.buckets.pick_places(sum(1 + row.num_drafts for row in order))
            bits, masked = self._mask(plan, order, mask, size)
            sampling = make_sampling_input(order, size, self.shape.max_rows)
            lora = self.adapters.of_places(order, size)
            sample = self._sample if lora is None else self._sample_adapted
            rows, sampled, reached = sample[size](
                self._head, self._state.rows, self._drafter.drafts, launch.hidden, sampling, bits, masked, lora
            )
            self._state = DeviceState(kv=self._compactor.compact(self._state.kv, rows, order), rows=rows)
        if not plan.proposes:
            self._drafter.skip(launch.ordered)
            return StepHandle(plan, padded_tokens, order, sampled, reached, parts=launch.parts)
        drafts = self._drafter.propose(
            launch.ordered, launch.bucket, launch.step, self._state.rows, launch.hidden, self._state.kv.states
        )
        return StepHandle(plan, padded_tokens, order, sampled, reached, drafts, launch.parts)

    def wait(self) -> None:
        """Wait until the device has done all that was dispatched."""
        jax.block_until_ready((self.params, self._state, self._drafter.state))

    def close(self) -> None:
        """Free what the runner holds on the device. It is of no use afterwards."""
        self.wait()
        self.compiles.close()
        held = self._state, self._no_mask, self.params, self._drafter.arrays(), self.adapters.arrays()
        for leaf in jax.tree.leaves(held):
            leaf.delete()

    @property
    def weight_bytes(self) -> int:
        """Of the model's weights on the device."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.params))

    @property
    def block_bytes(self) -> int:
        """Of a KV block in all layers, with the hidden states that lie beside it."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self._state.kv)) // self.shape.num_blocks

    # ------------------------------------------------------------------ warm-up
    def programs(self) -> list[tuple[Programs, Any]]:
        """Every program that serving may call, as (programs, key), the smallest first."""
        forward = [(self._forward, bucket) for bucket in self.buckets.forward()]
        sample = [(self._sample, places) for places in self.buckets.places]
        if self.adapters.changes_layers:
            forward += [(self._forward_adapted, bucket) for bucket in self.buckets.forward()]
        if self.adapters.changes_head:
            sample += [(self._sample_adapted, places) for places in self.buckets.places]
        rare: list[tuple[Programs, Any]] = [(self._rare, "copy"), (self._rare, "load")]
        others = (
            *self.adapters.programs(),
            *self._reader.programs(),
            *self._compactor.programs(),
            *self._drafter.programs(),
        )
        return [*forward, *sample, *rare, *others]

    # ------------------------------------------------------------------ parts
    def _step_input(self, ordered: list[RowPlan], bucket: Bucket) -> StepInput:
        return make_step_input(ordered, bucket, max_blocks=self.shape.max_blocks, buckets=self.buckets)

    def _newest(self) -> Newest:
        rows = self._state.rows
        return Newest(rows.last_token, rows.length, self._drafter.drafts)

    def _copy_blocks(self, copies: tuple[BlockCopy, ...]) -> None:
        # No target is the source of a later copy (see blocks.manager), so batches may follow each other.
        for first in range(0, len(copies), COPIES):
            batch = copies[first : first + COPIES]
            source, target = np.zeros(COPIES, np.int32), np.zeros(COPIES, np.int32)
            source[: len(batch)] = [copy.source for copy in batch]
            target[: len(batch)] = [copy.target for copy in batch]
            self._state = replace(self._state, kv=self._rare["copy"](self._state.kv, source, target))
            self._drafter.copy(source, target)

    def _load_row(self, row: RowPlan) -> None:
        self._state = replace(self._state, rows=self._drafter.start(row, self._state.rows))
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
        places = (1 + row.num_drafts if row.samples else 0 for row in plan.rows)
        ends = dict(zip((row.request_id for row in plan.rows), accumulate(places), strict=True))
        bits = np.full((size, mask.shape[1]), 2**32 - 1, np.uint32)
        first = 0
        for row in order:
            end, count = ends[row.request_id], 1 + row.num_drafts
            bits[first : first + count] = mask[end - count : end]
            first += count
        return bits, np.bool_(True)

    # ------------------------------------------------------------------ lowering
    def _lower_forward(self, bucket: Bucket, *, adapted: bool = False) -> jax.stages.Lowered:
        function = partial(
            programs.forward,
            config=self.config,
            bucket=bucket,
            max_places=self.buckets.max_places,
            backend=self.shape.backend,
            taps=self._taps,
        )
        step = self._step_input([], bucket)
        lora = self.adapters.like(bucket.rows) if adapted else None
        return jax.jit(function, donate_argnums=1).lower(self.params, self._state.kv, self._newest(), step, lora)

    def _lower_sample(self, places: int, *, adapted: bool = False) -> jax.stages.Lowered:
        return jax.jit(partial(programs.sample, typical=self._typical), donate_argnums=1).lower(
            self._head,
            self._state.rows,
            self._drafter.drafts,
            self._hidden,
            make_sampling_input([], places, self.shape.max_rows),
            self._no_mask[places],
            np.bool_(False),
            self.adapters.like(places) if adapted else None,
        )

    def _lower_rare(self, name: str) -> jax.stages.Lowered:
        if name == "copy":
            pairs = np.zeros(COPIES, np.int32)
            return jax.jit(programs.copy_blocks, donate_argnums=0).lower(self._state.kv, pairs, pairs)
        vocab = self.config.vocab_size
        return jax.jit(programs.load_row, donate_argnums=0).lower(
            self._state.rows, np.int32(0), np.zeros(vocab, np.int16), np.zeros(vocab, np.float32)
        )
