"""The KV cache of what guesses with one of its own, and the steps that it takes.

Its pools lie under the model's block ids, so that blocks which are shared, copied or freed are so for both, and a
prefix that is cached for one is cached for the other. They need no care beyond that: what is wrong in them costs right
drafts, never right tokens.

A row's state is how many of its tokens have been seen. Guessing begins with those that have not: the accepted drafts
and the newest token. Prompts are shown by ``observe``.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxserve.layers import KVCache
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import DecoderInput
from jaxserve.models.ragged import ragged_step
from jaxserve.sampling import RowState
from jaxserve.speculative.drafts import lineage
from jaxserve.speculative.proposer import ProposeInput

__all__ = ["DraftCache", "next_step", "tree_step", "unseen_step"]


@struct.dataclass
class DraftCache:
    """Keys and values, and how many tokens of each row they are of, [X] int32."""

    kv: KVCache
    seen: jax.Array

    @classmethod
    def empty(
        cls, config: ModelConfig, num_rows: int, num_blocks: int, block_size: int, dtype: jnp.dtype
    ) -> DraftCache:
        """For the layers of ``config``, num_rows rows and the dummy."""
        shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)
        return cls(KVCache.zeros(config.num_layers, shape, dtype), jnp.zeros(num_rows + 1, jnp.int32))

    def started(self, row: jax.Array) -> DraftCache:
        """A row was given to a request, of which nothing was seen."""
        return DraftCache(self.kv, self.seen.at[row].set(0))

    def copy(self, source: jax.Array, target: jax.Array) -> DraftCache:
        """Copy blocks source [C] over blocks target [C]."""
        return DraftCache(self.kv.copy(source, target), self.seen)

    def observed(self, kv: KVCache, rows: jax.Array, step: DecoderInput) -> DraftCache:
        """After a step that was shown; rows [R] are its rows in the row state, or out of range."""
        return DraftCache(kv, self.seen.at[rows].set(step.plan.kv_lens, mode="drop"))


def unseen_step(cache: DraftCache, rows: RowState, work: ProposeInput, most: int) -> DecoderInput:
    """The newest tokens of each row, from the first that was not seen: one at least, and ``most`` at most."""
    length = rows.length[work.at]
    counts = jnp.where(work.is_real, jnp.clip(length - cache.seen[work.at], 1, jnp.minimum(most, length)), 0)
    query_start = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
    start = length - counts
    at = jnp.arange(most * counts.shape[0], dtype=jnp.int32)
    token_rows = jnp.minimum((query_start[1:, None] <= at).sum(0), counts.shape[0] - 1)
    positions = start[token_rows] + at - query_start[token_rows]
    return ragged_step(
        rows.history.at[work.at[token_rows], positions].get(mode="fill", fill_value=0),
        token_rows,
        query_start,
        start,
        work.block_tables,
        work.is_real.sum(dtype=jnp.int32),
        cache.kv,
        queries=most,
        has_prefill=False,
    )


def next_step(tokens: jax.Array, positions: jax.Array, kv: KVCache, work: ProposeInput) -> DecoderInput:
    """One more token of each row, tokens [R] at positions [R]."""
    num_real = work.is_real.sum(dtype=jnp.int32)
    at = jnp.arange(tokens.shape[0] + 1, dtype=jnp.int32)
    return ragged_step(
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


def tree_step(
    tokens: jax.Array, parents: jax.Array, positions: jax.Array, kv: KVCache, work: ProposeInput
) -> DecoderInput:
    """A tree of each row: tokens [R, 1 + n] whose first stands at positions [R], and the node that each of the others
    follows, parents [R, n]. Its token t of row r is token (1 + n) r + t of the step."""
    num_rows, queries = tokens.shape
    num_real = work.is_real.sum(dtype=jnp.int32)
    tree = lineage(parents)
    return ragged_step(
        tokens.ravel(),
        jnp.repeat(jnp.arange(num_rows, dtype=jnp.int32), queries),
        jnp.minimum(jnp.arange(num_rows + 1, dtype=jnp.int32), num_real) * queries,
        positions,
        work.block_tables,
        num_real,
        kv,
        queries=queries,
        has_prefill=False,
        depth=(jax.lax.population_count(tree).sum(-1).astype(jnp.int32) - 1).ravel(),
        tree=tree,
    )
