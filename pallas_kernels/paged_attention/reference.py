"""jnp backend: runs everywhere, and works only on the blocks that its rows need.

Flash attention (Dao et al. 2022, arXiv:2205.14135) over chunks of the KV cache with an online softmax. Loops have
dynamic trip counts: decode rows go in groups, each as long as its longest row; prefill tiles go one by one, each as
long as its own context. So the cost follows the tokens in the cache, not the width of the block tables.

Chunk borders depend on positions alone and a masked chunk changes nothing, bit for bit: a row's result is the same in
any batch. Slots that no row owns may hold anything, NaN included.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.plan import PREFILL_TILE, AttentionPlan

__all__ = ["paged_attention"]

_CHUNK = 128  # KV tokens per inner step
_GROUP = 8  # decode rows per outer step
_MASKED = -1e30


_Tree = tuple[jax.Array, jax.Array]
"""Rows of ``AttentionPlan.tree`` and ``AttentionPlan.depth``: [g, w, ceil(w / 32)] and [g, w]."""


class _Pool(NamedTuple):
    """What the inner loop reads, and how."""

    k: jax.Array  # [N, S, K, D]
    v: jax.Array
    k_scale: jax.Array | None  # [N, S, K]
    v_scale: jax.Array | None
    scale: float
    window: int | None
    soft_cap: float | None


def paged_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    plan: AttentionPlan,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
) -> jax.Array:
    """See ``api.paged_attention``."""
    pool = _Pool(k_cache, v_cache, k_scale, v_scale, scale, window, soft_cap)
    out = _decode(q, jnp.zeros_like(q), pool, plan)
    return _prefill(q, out, pool, plan) if plan.has_prefill else out


def _decode(q: jax.Array, out: jax.Array, pool: _Pool, plan: AttentionPlan) -> jax.Array:
    num_rows = plan.kv_lens.shape[0]
    group = min(_GROUP, num_rows)

    def body(i: jax.Array, out: jax.Array) -> jax.Array:
        rows = i * group + jnp.arange(group)
        # Rows past the last decode row (prefill rows, padding) do nothing here.
        last = jnp.where(rows < plan.num_decode, plan.query_start[rows + 1], plan.query_start[rows])
        tree = None if plan.tree is None or plan.depth is None else (plan.tree[rows], plan.depth[rows])
        return _tile(q, out, pool, plan, rows, plan.query_start[rows], last, plan.decode_queries, tree)

    return jax.lax.fori_loop(0, -(-plan.num_decode // group), body, out)


def _prefill(q: jax.Array, out: jax.Array, pool: _Pool, plan: AttentionPlan) -> jax.Array:
    def body(i: jax.Array, out: jax.Array) -> jax.Array:
        row = plan.item_row[i][None]
        first = plan.query_start[row] + plan.item_start[i]
        return _tile(q, out, pool, plan, row, first, plan.query_start[row + 1], PREFILL_TILE)

    return jax.lax.fori_loop(0, plan.num_items, body, out)


def _tile(
    q: jax.Array,
    out: jax.Array,
    pool: _Pool,
    plan: AttentionPlan,
    rows: jax.Array,
    first: jax.Array,
    last: jax.Array,
    width: int,
    tree: _Tree | None = None,
) -> jax.Array:
    """Attend up to ``width`` query tokens first[g] .. last[g] - 1 of each row rows[g], and write them into ``out``."""
    token = first[:, None] + jnp.arange(width)  # [g, w]
    valid = token < last[:, None]
    kv_len = plan.kv_lens[rows][:, None]
    position = jnp.where(valid, kv_len - plan.query_start[rows + 1][:, None] + token, -1)  # [g, w]
    num_kv = pool.k.shape[2]
    queries = jnp.take(q, token, axis=0, mode="clip")  # [g, w, H, D]
    queries = queries.reshape(*token.shape, num_kv, -1, q.shape[-1]).astype(jnp.float32) * pool.scale
    result = _flash(queries, position, plan.block_tables[rows], pool, tree).reshape(*token.shape, *q.shape[1:])
    target = jnp.where(valid, token, q.shape[0])
    return out.at[target].set(result.astype(out.dtype), mode="drop")


def _flash(queries: jax.Array, position: jax.Array, tables: jax.Array, pool: _Pool, tree: _Tree | None) -> jax.Array:
    """Attention of queries [g, w, K, H/K, D] in slots position [g, w] (-1: none) over tables [g, B] -> like queries."""
    block_size = pool.k.shape[1]
    blocks = max(1, _CHUNK // block_size)
    chunk = blocks * block_size
    end = -(-(jnp.max(position) + 1) // chunk)
    begin = jnp.int32(0)
    if pool.window is not None:
        oldest = jnp.min(jnp.where(position < 0, jnp.iinfo(jnp.int32).max, position)) - pool.window + 1
        begin = jnp.clip(oldest // chunk, 0, end)

    def body(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        acc, top, total = carry
        ids = jnp.take(tables, i * blocks + jnp.arange(blocks), axis=1, mode="clip")  # [g, blocks]
        k = _gather(pool.k, pool.k_scale, ids)  # [g, c, K, D]
        v = _gather(pool.v, pool.v_scale, ids)
        sees = _sees(i * chunk + jnp.arange(chunk), position, pool.window, tree)
        scores = jnp.einsum("gwkhd,gckd->gkwhc", queries, k, preferred_element_type=jnp.float32)
        if pool.soft_cap is not None:
            scores = pool.soft_cap * jnp.tanh(scores / pool.soft_cap)
        scores = jnp.where(sees[:, None, :, None], scores, _MASKED)
        new_top = jnp.maximum(top, scores.max(-1))
        weights = jnp.where(sees[:, None, :, None], jnp.exp(scores - new_top[..., None]), 0.0)
        # A slot that no query sees may hold NaN, and 0 * NaN is NaN.
        v = jnp.where(sees.any(1)[:, :, None, None], v, 0)
        keep = jnp.exp(top - new_top)
        part = jnp.einsum("gkwhc,gckd->gkwhd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return acc * keep[..., None] + part, new_top, total * keep + weights.sum(-1)

    g, w, num_kv, heads, dim = queries.shape
    shape = (g, num_kv, w, heads)
    start = (jnp.zeros((*shape, dim)), jnp.full(shape, _MASKED), jnp.zeros(shape))
    acc, _, total = jax.lax.fori_loop(begin, end, body, start)
    return (acc / jnp.maximum(total, 1e-30)[..., None]).transpose(0, 2, 1, 3, 4)


def _gather(pool: jax.Array, scale: jax.Array | None, ids: jax.Array) -> jax.Array:
    """Blocks ids [g, b] of pool [N, S, K, D], multiplied out: [g, b * S, K, D]."""
    blocks = pool[ids]
    if scale is not None:
        blocks = blocks.astype(jnp.float32) * scale[ids][..., None].astype(jnp.float32)
    return blocks.reshape(ids.shape[0], -1, *pool.shape[2:])


def _sees(at: jax.Array, position: jax.Array, window: int | None, tree: _Tree | None) -> jax.Array:
    """Which of slots at [c] the queries in slots position [g, w] see, as [g, w, c]."""
    if tree is None:
        sees = at <= position[..., None]
        return sees if window is None else sees & (at > position[..., None] - window)
    bits, depth = tree
    start = position[:, :1]  # the tile holds all of its rows' queries
    query = at - start  # [g, c]
    word = jnp.take_along_axis(bits, jnp.clip(query // 32, 0, bits.shape[2] - 1)[:, None], axis=2)
    bit = word >> (query % 32).astype(jnp.uint32)[:, None] & 1
    before = (query < 0)[:, None]
    if window is not None:
        before = before & (at > (start + depth)[..., None] - window)
    return (at <= position[..., None]) & (before | ((query >= 0)[:, None] & (bit == 1)))
