"""A ragged batch of tokens as the decoder wants it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxserve.layers import KVCache
from jaxserve.models.decoder import DecoderInput
from pallas_kernels.paged_attention import make_plan

__all__ = ["ragged_step"]


def ragged_step(
    tokens: jax.Array,
    token_rows: jax.Array,
    query_start: jax.Array,
    start: jax.Array,
    block_tables: jax.Array,
    num_decode: jax.Array,
    kv: KVCache,
    *,
    queries: int,
    has_prefill: bool,
    depth: jax.Array | None = None,
    tree: jax.Array | None = None,
) -> DecoderInput:
    """The decoder's input for rows of tokens that are consecutive, or nodes of trees.

    Args:
        tokens: [T] token ids, row after row, then padding.
        token_rows: [T] int32, row of each token.
        query_start: [R + 1] int32, first token of each row; the last entry is the number of real tokens.
        start: [R] int32, position of each row's first token.
        block_tables: [R, B] int32.
        num_decode: [] int32, how many rows, from the first, have at most ``queries`` tokens.
        kv: the cache that they are written to.
        queries, has_prefill, tree: see ``AttentionPlan``.
        depth: [T] int32, how many of its row's tokens come before each; None if all those that it stands behind do.
    """
    at = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    places = start[token_rows] + at - query_start[token_rows]
    blocks = block_tables[token_rows, places // kv.block_size]
    # Distinct out-of-range slots for padding: the scatter is told that its indices are unique.
    slots = blocks * kv.block_size + places % kv.block_size
    slots = jnp.where(at < query_start[-1], slots, kv.num_slots + at)
    plan = make_plan(
        query_start,
        start + query_start[1:] - query_start[:-1],
        block_tables,
        num_decode,
        num_tokens=tokens.shape[0],
        decode_queries=queries,
        has_prefill=has_prefill,
        tree=tree,
    )
    return DecoderInput(tokens, places if depth is None else start[token_rows] + depth, slots, plan)
