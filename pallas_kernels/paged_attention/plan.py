"""The work of one step's attention, made once and shared by all layers.

A step is a ragged batch: row r owns query tokens ``query_start[r] .. query_start[r + 1] - 1``, the newest of its
``kv_lens[r]`` tokens. Rows with few query tokens (decodes and verifies) come first; the others are cut into tiles of
query tokens. Both lists have a fixed shape and a dynamic length, so that work follows what is there, not the bucket.

Letters: T tokens, R rows, B blocks per row, W prefill items.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

__all__ = ["PREFILL_TILE", "AttentionPlan", "make_plan"]

PREFILL_TILE = 64
"""Query tokens per prefill item."""


@struct.dataclass
class AttentionPlan:
    """Work lists of one step.

    Attributes:
        query_start: [R + 1] int32, first query token of each row; rows past the last real one are empty.
        kv_lens: [R] int32, tokens of each row in the cache, this step's included.
        block_tables: [R, B] int32, block ids of each row.
        num_decode: [] int32, rows 0 .. num_decode - 1 have at most ``decode_queries`` query tokens each.
        item_row: [W] int32, row of each prefill item.
        item_start: [W] int32, its first query token, counted within the row.
        num_items: [] int32, how many prefill items there are.
        decode_queries: most query tokens of a decode row (1 + number of drafts).
        has_prefill: whether the step may hold prefill rows at all.
    """

    query_start: jax.Array
    kv_lens: jax.Array
    block_tables: jax.Array
    num_decode: jax.Array
    item_row: jax.Array
    item_start: jax.Array
    num_items: jax.Array
    decode_queries: int = struct.field(pytree_node=False)
    has_prefill: bool = struct.field(pytree_node=False)


def make_plan(
    query_start: jax.Array,
    kv_lens: jax.Array,
    block_tables: jax.Array,
    num_decode: jax.Array,
    *,
    num_tokens: int,
    decode_queries: int = 1,
    has_prefill: bool = True,
) -> AttentionPlan:
    """Make the work lists from query_start [R + 1], kv_lens [R], block_tables [R, B] and num_decode [].

    ``num_tokens`` is T, the static number of query tokens (padding included); it bounds the number of prefill items.
    Pure: call it inside a jitted step, once.
    """
    rows = kv_lens.shape[0]
    lens = query_start[1:] - query_start[:-1]
    is_prefill = jnp.arange(rows) >= num_decode
    tiles = jnp.where(is_prefill, -(-lens // PREFILL_TILE), 0)
    ends = jnp.cumsum(tiles)
    item = jnp.arange(num_tokens // PREFILL_TILE + min(rows, num_tokens))
    # compare_all: the default method becomes a loop on the device.
    row = jnp.searchsorted(ends, item, side="right", method="compare_all").astype(jnp.int32)
    row = jnp.minimum(row, rows - 1)
    start = (item - (ends[row] - tiles[row])) * PREFILL_TILE
    return AttentionPlan(
        query_start=query_start,
        kv_lens=kv_lens,
        block_tables=block_tables,
        num_decode=num_decode,
        item_row=row,
        item_start=start.astype(jnp.int32),
        num_items=ends[-1].astype(jnp.int32),
        decode_queries=decode_queries,
        has_prefill=has_prefill,
    )
