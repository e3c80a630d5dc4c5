"""The body that both launches of the Triton backend share: a tile of queries over a range of cached tokens.

Flash attention (Dao et al. 2022, arXiv:2205.14135) over keys that are gathered through the block table, token by token,
so that tiles and blocks need not have anything to do with each other. Query heads that read the same KV head are
packed into the rows of one matrix tile together with the query tokens: a decode of a group of 8 heads is a matrix
product and not 8 matrix-vector products, and a key is read once for all of them.

Sizes that are no powers of two (head dims, groups, what a row leaves of the last tile) are masked. A masked lane reads
nothing, so slots that no row owns may hold anything. The interpreter asks for a few things: a masked access spells all
its axes as index arrays, and lanes that must not be stored point out of bounds.

Letters: M rows of the tile (query tokens x heads of a group), N keys of an inner step, D head dim padded to a power of
two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.launching import Ref, dot, load, wide

__all__ = ["MASKED", "Inputs", "Rows", "Tile", "attend", "pack_rows", "row_index", "visible"]

MASKED = -1e30
_LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Tile:
    """What a kernel is compiled for."""

    rows: int
    """M, a power of two; its first (rows // group) * group are used."""
    keys: int
    """N, a power of two."""
    group: int
    """Query heads per KV head."""
    dtype: jnp.dtype
    """What the matrix units multiply; sums are float32."""
    scale: float
    window: int | None
    soft_cap: float | None
    tree: bool
    """Whether a tree says what a query token sees of its row's query tokens."""

    @property
    def queries(self) -> int:
        """Query tokens of a tile."""
        return self.rows // self.group


class Inputs(NamedTuple):
    """What is read, see ``api.paged_attention`` and ``AttentionPlan``; k_scale, v_scale, tree and depth may be None."""

    q: Ref
    k: Ref
    v: Ref
    k_scale: Ref
    v_scale: Ref
    query_start: Ref
    kv_lens: Ref
    block_tables: Ref
    tree: Ref
    depth: Ref


class Rows(NamedTuple):
    """What stands in the rows of a tile: [M] each."""

    query: jax.Array
    """Query token, counted within its row of the batch."""
    position: jax.Array
    """Its position in its sequence."""
    token: jax.Array
    """Its index in q; out of bounds where the tile's row is not used."""
    head: jax.Array
    used: jax.Array


def pack_rows(
    tile: Tile, inputs: Inputs, row: jax.Array, first: jax.Array, last: jax.Array, kv_head: jax.Array
) -> Rows:
    """The row's query tokens [first, last), or as many as the tile holds, heads of the group side by side."""
    start, count = inputs.query_start[row], inputs.query_start[row + 1] - inputs.query_start[row]
    lane = lax.iota(jnp.int32, tile.rows)
    query = first + lax.div(lane, tile.group)
    used = (lane < tile.queries * tile.group) & (query < last)
    token = jnp.where(used, start + query, inputs.q.shape[0])
    head = kv_head * tile.group + lax.rem(lane, tile.group)
    depth = load(inputs.depth, (row, query), used) if tile.tree else query
    return Rows(query, inputs.kv_lens[row] - count + depth, token, head, used)


def row_index(rows: Rows, head_dim: int) -> tuple[tuple[jax.Array, jax.Array, jax.Array], jax.Array]:
    """Where the tile [M, D] lies in an array [T, H, D], and which of it is there."""
    dim = lax.iota(jnp.int32, pl.next_power_of_2(head_dim))
    shape = (rows.token.shape[0], dim.shape[0])
    index = (wide(rows.token[:, None], shape), wide(rows.head[:, None], shape), wide(dim[None, :], shape))
    return index, wide(rows.used[:, None] & (dim < head_dim)[None, :], shape)


def visible(
    tile: Tile, query_start: Ref, kv_lens: Ref, row: jax.Array, first: jax.Array, last: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Cached tokens [begin, end) that any of the row's query tokens [first, last) sees."""
    length = kv_lens[row]
    before = length - (query_start[row + 1] - query_start[row])
    end = length if tile.tree else before + last
    if tile.window is None:
        return jnp.int32(0), end
    # No query of a tree stands before the first.
    return jnp.maximum(before + (0 if tile.tree else first) - tile.window + 1, 0), end


def attend(
    tile: Tile, inputs: Inputs, row: jax.Array, rows: Rows, kv_head: jax.Array, begin: jax.Array, end: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Attention of the tile over the row's cached tokens [begin, end), all of them the row's own.

    Returns:
        [M, D] float32 and the base-2 logarithm of the softmax's denominator [M]; zeros and ``MASKED`` where a query
        sees none of the tokens.
    """
    head_dim = inputs.q.shape[2]
    index, mask = row_index(rows, head_dim)
    q = load(inputs.q, index, mask).astype(tile.dtype)
    dim = lax.iota(jnp.int32, q.shape[1])
    block_size = inputs.k.shape[1]
    shape = (tile.keys, q.shape[1])

    def body(step: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        acc, top, total = carry
        key = step * tile.keys + lax.iota(jnp.int32, tile.keys)
        there = (key >= begin) & (key < end)
        block = load(inputs.block_tables, (row, lax.div(key, block_size)), there)
        slot = (block, lax.rem(key, block_size), kv_head)
        lanes = (wide(block[:, None], shape), wide(slot[1][:, None], shape), kv_head, wide(dim[None, :], shape))
        mask = wide(there[:, None] & (dim < head_dim)[None, :], shape)
        k = load(inputs.k, lanes, mask).astype(tile.dtype)
        scores = dot(q, k, axis=1)
        if inputs.k_scale is not None:
            scores *= load(inputs.k_scale, slot, there).astype(jnp.float32)[None, :]
        if tile.soft_cap is None:
            scores *= tile.scale * _LOG2_E
        else:
            scores = jnp.tanh(scores * (tile.scale / tile.soft_cap)) * (tile.soft_cap * _LOG2_E)
        sees = there[None, :] & _sees(tile, inputs, row, rows, key)
        scores = jnp.where(sees, scores, MASKED)
        new_top = jnp.maximum(top, scores.max(1))
        # The second where: a query that has seen nothing yet would count exp2(MASKED - MASKED).
        weights = jnp.where(sees, jnp.exp2(scores - new_top[:, None]), 0.0)
        keep = jnp.exp2(top - new_top)
        total = total * keep + weights.sum(1)
        v = load(inputs.v, lanes, mask).astype(tile.dtype)
        if inputs.v_scale is not None:
            weights *= load(inputs.v_scale, slot, there).astype(jnp.float32)[None, :]
        part = dot(weights.astype(tile.dtype), v)
        return acc * keep[:, None] + part, new_top, total

    start = (jnp.zeros((tile.rows, q.shape[1]), jnp.float32), jnp.full(tile.rows, MASKED), jnp.zeros(tile.rows))
    # Steps start at multiples of N, wherever the range begins: a query's sums do not depend on its tile.
    steps = (lax.div(begin, tile.keys), lax.div(end + tile.keys - 1, tile.keys))
    acc, top, total = lax.fori_loop(*steps, body, start)
    seen = total > 0
    total = jnp.where(seen, total, 1.0)
    return acc / total[:, None], jnp.where(seen, top + jnp.log2(total), MASKED)


def _sees(tile: Tile, inputs: Inputs, row: jax.Array, rows: Rows, key: jax.Array) -> jax.Array:
    """Which keys [N] each of the tile's rows sees, as [M, N]."""
    if tile.tree:
        count = inputs.query_start[row + 1] - inputs.query_start[row]
        other = wide((key - (inputs.kv_lens[row] - count))[None, :], (tile.rows, tile.keys))
        query = wide(rows.query[:, None], other.shape)
        within = (other >= 0) & (other < count) & rows.used[:, None]
        word = load(inputs.tree, (row, query, lax.div(jnp.maximum(other, 0), 32)), within)
        bit = word >> (other & 31).astype(jnp.uint32) & jnp.uint32(1)
        before = other < 0
        if tile.window is not None:
            before &= key[None, :] > rows.position[:, None] - tile.window
        return before | ((other >= 0) & (bit == 1))
    sees = key[None, :] <= rows.position[:, None]
    if tile.window is not None:
        sees &= key[None, :] > rows.position[:, None] - tile.window
    return sees
