"""The work of one step's attention, made once and shared by all layers.

A step is a ragged batch: row r owns query tokens ``query_start[r] .. query_start[r + 1] - 1``, the newest of its
``kv_lens[r]`` tokens. Rows with few query tokens (decodes and verifies) come first; the others are cut into tiles of
query tokens. A decode row has little to do per cached token and may have many of those: its cache is cut into chunks,
each an item of its own (flash-decoding), so that a few long rows keep a whole chip busy. **How a row is cut follows
from its own length only**, so that its result does not depend on the batch.

All lists have a fixed shape and a dynamic length, so that work follows what is there, not the bucket. A backend takes
those that it needs; under jit the others cost nothing.

Letters: T tokens, R rows, B blocks per row, Q decode queries, W items.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from pallas_kernels.work_lists import items, owner

__all__ = ["PREFILL_TILE", "AttentionPlan", "make_plan", "max_chunks"]

PREFILL_TILE = 64
"""Query tokens per prefill item."""

_CHUNK = 256  # fewest cached tokens per chunk; longer chunks are this times a power of two
# Most chunks of a row. A chunk leaves a float32 partial result per query token: they must stay small beside the KV.
_MAX_CHUNKS = 32
_MAX_CHUNKS_OF_VERIFIES = 16
_DOUBLINGS = 16  # enough for 2 ** 28 tokens


@struct.dataclass
class AttentionPlan:
    """Work lists of one step.

    Attributes:
        query_start: [R + 1] int32, first query token of each row; rows past the last real one are empty.
        kv_lens: [R] int32, tokens of each row in the cache, this step's included.
        block_tables: [R, B] int32, block ids of each row.
        num_decode: [] int32, rows 0 .. num_decode - 1 have at most ``decode_queries`` query tokens each.
        tree: [R, Q, ceil(Q / 32)] uint32 or None, which of its row's query tokens each query token of a decode row
            sees: bit j % 32 of word j // 32 of query i stands for query j, whose slot is kv_len - n + j in a row of n
            query tokens. It sees itself and none that come later. What lies before the row's query tokens is always
            seen. None: query i sees queries 0 .. i.
        depth: [R, Q] int32 or None, how many queries each query of a tree sees besides itself: it stands at position
            kv_len - n + depth of its sequence, and that is what windows count from.
        item_row: [W] int32, row of each prefill item.
        item_start: [W] int32, its first query token, counted within the row.
        num_items: [] int32, how many prefill items there are.
        chunk: [R] int32, cached tokens per chunk of each row.
        chunk_row: [W'] int32, row of each chunk of the decode rows.
        chunk_index: [W'] int32, which of its row's chunks: it holds tokens index * chunk .. (index + 1) * chunk - 1.
        num_chunks: [] int32, how many chunks there are.
        token_row: [min(T, R * Q)] int32, row of each query token of the decode rows; past them it means nothing.
        decode_queries: most query tokens of a decode row (1 + number of drafts), Q.
        has_prefill: whether the step may hold prefill rows at all.
    """

    query_start: jax.Array
    kv_lens: jax.Array
    block_tables: jax.Array
    num_decode: jax.Array
    tree: jax.Array | None
    depth: jax.Array | None
    item_row: jax.Array
    item_start: jax.Array
    num_items: jax.Array
    chunk: jax.Array
    chunk_row: jax.Array
    chunk_index: jax.Array
    num_chunks: jax.Array
    token_row: jax.Array
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
    tree: jax.Array | None = None,
) -> AttentionPlan:
    """Make the work lists from query_start [R + 1], kv_lens [R], block_tables [R, B] and num_decode [].

    ``num_tokens`` is T, the static number of query tokens (padding included); it bounds the number of prefill items.
    The other arguments are as in ``AttentionPlan``. Pure: call it inside a jitted step, once.
    """
    rows = kv_lens.shape[0]
    lens = query_start[1:] - query_start[:-1]
    is_decode = jnp.arange(rows) < num_decode
    tiles = jnp.where(is_decode, 0, -(-lens // PREFILL_TILE))
    item_row, item_index, num_items = items(tiles, num_tokens // PREFILL_TILE + min(rows, num_tokens))
    chunk = _chunk_tokens(kv_lens, decode_queries)
    chunks = jnp.where(is_decode & (lens > 0), -(-kv_lens // chunk), 0)
    chunk_row, chunk_index, num_chunks = items(chunks, rows * _most_chunks(decode_queries))
    token = jnp.arange(min(num_tokens, rows * decode_queries))
    return AttentionPlan(
        query_start=query_start,
        kv_lens=kv_lens,
        block_tables=block_tables,
        num_decode=num_decode,
        tree=tree,
        depth=None if tree is None else jax.lax.population_count(tree).sum(-1).astype(jnp.int32) - 1,
        item_row=item_row,
        item_start=item_index * PREFILL_TILE,
        num_items=num_items,
        chunk=chunk,
        chunk_row=chunk_row,
        chunk_index=chunk_index,
        num_chunks=num_chunks,
        token_row=owner(query_start[1:], token),
        decode_queries=decode_queries,
        has_prefill=has_prefill,
    )


def max_chunks(context: int, decode_queries: int) -> int:
    """Most chunks that decode rows of up to ``context`` cached tokens are cut into."""
    return min(-(-context // _CHUNK), _most_chunks(decode_queries))


def _most_chunks(decode_queries: int) -> int:
    return _MAX_CHUNKS if decode_queries == 1 else _MAX_CHUNKS_OF_VERIFIES


def _chunk_tokens(kv_lens: jax.Array, decode_queries: int) -> jax.Array:
    """Cached tokens per chunk of rows of kv_lens [R]: the fewest with which a row has no more chunks than it may."""
    longest = _most_chunks(decode_queries) * _CHUNK * 2 ** jnp.arange(_DOUBLINGS)
    return (_CHUNK * 2 ** (kv_lens[:, None] > longest).sum(1)).astype(jnp.int32)
