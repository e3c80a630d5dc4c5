"""Ragged batches over pools of random blocks, all made on the device, and chains of attention calls over them.

A chain calls attention many times in one program, each call with block tables of its own: they cover so much of the
pools that a call finds nothing in the second-level cache that an earlier one left there. Each call's queries are the
result of the call before, so that none can be left out or overlap another.

Letters as in ``paged_attention.plan``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import AttentionPlan, Backend, make_plan

__all__ = ["Batch", "Heads", "Pools", "Rows", "chain", "gather_attention", "kv_bytes", "make_batch", "make_pools"]

Rows = Sequence[tuple[int, int]]
"""Per row (query tokens, tokens in the cache); decodes first."""

BLOCK_SIZE = 16
_OUTRUN = 256 << 20  # bytes, several times the second-level cache of any chip
_DRAWN = 4096  # blocks
_CALLS = (4, 64)  # fewest and most of a chain


class Heads(NamedTuple):
    """H, K, D."""

    heads: int
    kv_heads: int
    head_dim: int


class Pools(NamedTuple):
    """Keys and values [N, S, K, D], and scales [N, S, K] if they are quantised."""

    k: jax.Array
    v: jax.Array
    scales: dict[str, jax.Array]


class Batch(NamedTuple):
    """One step's queries [T, H, D], its rows, and the block tables [R, B] of each call."""

    q: jax.Array
    query_start: jax.Array
    kv_lens: jax.Array
    num_decode: jax.Array
    tables: list[jax.Array]


def make_pools(num_blocks: int, heads: Heads, dtype: str = "bfloat16") -> Pools:
    """Pools of random blocks, of which some thousands differ; one-byte ones have scales."""
    shape = (min(num_blocks, _DRAWN), BLOCK_SIZE, heads.kv_heads, heads.head_dim)
    one_byte = jnp.dtype(dtype).itemsize == 1

    @jax.jit
    def draw(key: jax.Array) -> jax.Array:
        if one_byte:
            blocks = jax.random.randint(key, shape, -100, 100, jnp.int8).astype(dtype)
        else:
            blocks = jax.random.normal(key, shape, dtype)
        return blocks[jnp.arange(num_blocks) % shape[0]]

    keys = jax.random.split(jax.random.key(0))
    scale = jnp.full((num_blocks, *shape[1:3]), 0.02, jnp.float32)
    return Pools(draw(keys[0]), draw(keys[1]), {"k_scale": scale, "v_scale": scale} if one_byte else {})


def kv_bytes(rows: Rows, pools: Pools) -> int:
    """Bytes of the keys and values of all rows, with their scales: what a call has to read."""
    _, _, kv_heads, head_dim = pools.k.shape
    scale = 4 if pools.scales else 0
    return 2 * sum(tokens for _, tokens in rows) * kv_heads * (head_dim * pools.k.dtype.itemsize + scale)


def make_batch(rows: Rows, pools: Pools, heads: Heads, *, calls: int | None = None) -> Batch:
    """A batch with block tables for a number of calls, by default as many as outrun the cache.

    Raises:
        ValueError: the pools have too few blocks for one call.
    """
    queries, lens = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    num_blocks = pools.k.shape[0] - 1  # block 0 is nobody's
    per_row = -(-lens // BLOCK_SIZE)
    if per_row.sum() > num_blocks:
        raise ValueError(f"{per_row.sum()} blocks are needed, and there are {num_blocks}")
    calls = calls or min(max(-(-_OUTRUN // kv_bytes(rows, pools)), _CALLS[0]), _CALLS[1])
    rng = np.random.default_rng(0)
    # All of the pools in random order, again from the start where that is not enough.
    ids = np.resize(rng.permutation(num_blocks).astype(np.int32) + 1, (calls, per_row.sum()))
    owned = np.arange(per_row.max()) < per_row[:, None]
    tables = []
    for own in ids:
        table = np.zeros(owned.shape, np.int32)
        table[owned] = own
        tables.append(jnp.asarray(table))
    dtype = jnp.bfloat16 if pools.scales else pools.k.dtype
    return Batch(
        q=jax.random.normal(jax.random.key(1), (int(queries.sum()), heads.heads, heads.head_dim), dtype),
        query_start=jnp.asarray(np.concatenate([[0], np.cumsum(queries)]), jnp.int32),
        kv_lens=jnp.asarray(lens),
        num_decode=jnp.int32((queries == 1).sum()),
        tables=tables,
    )


def chain(attend: Backend, *, has_prefill: bool) -> Callable[[Batch, Pools], jax.Array]:
    """A function to be jitted: one call of ``attend`` for each of the batch's block tables, one after the other."""

    def run(batch: Batch, pools: Pools) -> jax.Array:
        q, (num_tokens, _, head_dim) = batch.q, batch.q.shape
        rows = (batch.query_start, batch.kv_lens, batch.tables[0], batch.num_decode)
        plan = make_plan(*rows, num_tokens=num_tokens, has_prefill=has_prefill)
        # Jitted on its own: it is traced and lowered once.
        call = jax.jit(partial(attend, scale=head_dim**-0.5))
        for tables in batch.tables:
            q = call(q, pools.k, pools.v, plan.replace(block_tables=tables), **pools.scales)
        return q

    return run


def gather_attention(
    q: jax.Array, k_cache: jax.Array, v_cache: jax.Array, plan: AttentionPlan, *, scale: float
) -> jax.Array:
    """Attention of decodes as one writes it without a kernel: gather all blocks of all rows, then a masked softmax."""
    num_rows, kv_heads = plan.kv_lens.shape[0], k_cache.shape[2]
    k, v = (pool[plan.block_tables].reshape(num_rows, -1, *pool.shape[2:]) for pool in (k_cache, v_cache))
    grouped = q.reshape(num_rows, kv_heads, -1, q.shape[-1])
    scores = jnp.einsum("rkgd,rckd->rkgc", grouped, k, preferred_element_type=jnp.float32) * scale
    seen = jnp.arange(k.shape[1]) < plan.kv_lens[:, None]
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -jnp.inf), axis=-1).astype(v.dtype)
    out = jnp.einsum("rkgc,rckd->rkgd", weights, v, preferred_element_type=jnp.float32)
    return out.reshape(q.shape).astype(q.dtype)
