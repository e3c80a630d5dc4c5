"""A smaller model of the same vocabulary writes ahead (Leviathan et al. 2023, arXiv:2211.17192).

Its KV lies in pools of its own under the same block ids, so that blocks which are shared, copied or freed are so for
both models, and a prefix that is cached for one is cached for the other. Its KV needs no care beyond that: what is
wrong in it costs right drafts, never right tokens.

A row's state is how many of its tokens the draft model has seen. Guessing begins with those that it has not: the
accepted drafts and the newest token, at most K + 1. Prompts are shown to it by ``observe``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from jaxserve.layers import KVCache
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import DecoderInput, decode, logits
from jaxserve.models.ragged import ragged_step
from jaxserve.sampling import RowState, sample_plainly
from jaxserve.speculative.drafts import Proposal
from jaxserve.speculative.proposer import ProposeInput

__all__ = ["DraftModelProposer", "DraftModelState"]


@struct.dataclass
class DraftModelState:
    """The draft model's KV, and how many tokens of each row it has seen, [X] int32."""

    kv: KVCache
    seen: jax.Array


@dataclass(frozen=True)
class DraftModelProposer:
    """A chain of K tokens by a model of its own.

    Attributes:
        num_drafts: K.
        config: the draft model.
        dtype: of its KV, as a numpy name.
        backend: who computes attention.
    """

    num_drafts: int
    config: ModelConfig
    dtype: str
    backend: str
    is_tree: ClassVar[bool] = False
    has_cache: ClassVar[bool] = True

    @property
    def max_depth(self) -> int:
        """K."""
        return self.num_drafts

    def initial(self, num_rows: int, num_blocks: int, block_size: int) -> DraftModelState:
        """An empty KV cache, and nothing seen."""
        shape = (num_blocks, block_size, self.config.num_kv_heads, self.config.head_dim)
        kv = KVCache.zeros(self.config.num_layers, shape, jnp.dtype(self.dtype))
        return DraftModelState(kv, jnp.zeros(num_rows + 1, jnp.int32))

    def start(self, state: DraftModelState, rows: RowState, row: jax.Array, known: jax.Array) -> DraftModelState:
        """Its tokens are shown as any others."""
        return state

    def copy(self, state: DraftModelState, source: jax.Array, target: jax.Array) -> DraftModelState:
        """Copy blocks source [C] over blocks target [C]."""
        return DraftModelState(state.kv.copy(source, target), state.seen)

    def observe(self, params: Any, state: DraftModelState, rows: jax.Array, step: DecoderInput) -> DraftModelState:
        """Write the KV of a step's tokens."""
        _, kv = decode(params, self.config, step, state.kv, backend=self.backend)
        return DraftModelState(kv, state.seen.at[rows].set(step.plan.kv_lens, mode="drop"))

    def propose(
        self, params: Any, state: DraftModelState, rows: RowState, work: ProposeInput
    ) -> tuple[DraftModelState, Proposal]:
        """Chains of K drafts: each is what the draft model would sample, with the noise of its position."""
        length = rows.length[work.at]
        step = self._unseen(state, rows, work)
        last = step.plan.query_start[1:] - 1
        kv, drafts = state.kv, []
        for ahead in range(self.num_drafts):
            hidden, kv = decode(params, self.config, step, kv, backend=self.backend)
            scores = logits(params, hidden[jnp.maximum(last, 0)])
            drafts.append(sample_plainly(scores, work.temperature, work.seeds, length + ahead))
            step, last = self._next(drafts[-1], length + ahead, kv, work)
        state = DraftModelState(kv, state.seen.at[work.at].set(length))
        return state, Proposal(jnp.stack(drafts, axis=1))

    def _unseen(self, state: DraftModelState, rows: RowState, work: ProposeInput) -> DecoderInput:
        """The newest tokens of each row, from the first that the draft model has not seen."""
        most = self.num_drafts + 1
        length = rows.length[work.at]
        counts = jnp.where(work.is_real, jnp.clip(length - state.seen[work.at], 1, jnp.minimum(most, length)), 0)
        query_start = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
        start = length - counts
        at = jnp.arange(most * counts.shape[0], dtype=jnp.int32)
        token_rows = jnp.minimum((query_start[1:, None] <= at).sum(0), counts.shape[0] - 1)
        positions = start[token_rows] + at - query_start[token_rows]
        tokens = rows.history.at[work.at[token_rows], positions].get(mode="fill", fill_value=0)
        return ragged_step(
            tokens,
            token_rows,
            query_start,
            start,
            work.block_tables,
            work.is_real.sum(dtype=jnp.int32),
            state.kv,
            queries=most,
            has_prefill=False,
        )

    def _next(
        self, tokens: jax.Array, positions: jax.Array, kv: KVCache, work: ProposeInput
    ) -> tuple[DecoderInput, jax.Array]:
        """One token of each row, and where it stands in the step."""
        num_real = work.is_real.sum(dtype=jnp.int32)
        at = jnp.arange(tokens.shape[0] + 1, dtype=jnp.int32)
        step = ragged_step(
            tokens,
            at[:-1],
            jnp.minimum(at, num_real),
            positions,
            work.block_tables,
            num_real,
            kv,
            queries=1,
            has_prefill=False,
        )
        return step, at[:-1]
