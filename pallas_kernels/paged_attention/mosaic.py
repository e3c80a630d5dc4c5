"""Hopper backend: a Pallas kernel for decodes and verifies that is lowered through Mosaic GPU (TMA, wgmma).

Decode rows are cut into the plan's chunks, each attended by ``mosaic_kernel``; XLA packs the queries before it and
combines the chunks' float32 sums after it. Prompt chunks go to the Triton backend, or where its lowering is gone to the
reference, as a plan without decodes: so a row is computed by the same kernel in every batch.

"auto" tries Triton first, and so takes this one only where the Triton lowering is missing: nobody has measured it to be
faster yet.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import tuning
from pallas_kernels.paged_attention import reference, triton
from pallas_kernels.paged_attention.plan import AttentionPlan, max_chunks
from pallas_kernels.paged_attention.triton_tile import MASKED

__all__ = ["paged_attention", "refuse"]

_DTYPES = ("bfloat16", "float16")
_HEAD_DIMS = (64, 128)
_BLOCK_SIZES = (8, 16, 32, 64)
_HOPPER = 90
_MAX_GROUP = 64
_PROGRAMS = 132  # a program fills a multiprocessor, and this many have an H100 and an H200
_DEPTH = {64: 4, 128: 2}  # by head dim, stages of each consumer: 128 KiB of keys and values


def refuse(head_dim: int, dtype: str, *, tree: bool = False) -> str | None:
    """Why it cannot serve heads of this size, pools of this dtype and, if asked for, trees; None if it can."""
    gpu = tuning.target()
    if gpu is None:
        return "it runs on NVIDIA GPUs only"
    if gpu.capability != _HOPPER:
        return f"it is made for compute capability 9.0, and {gpu.kind} has {gpu.capability / 10}"
    if tree:
        return "it has no tree masks"
    return _refuse_pools(head_dim, dtype) or _refuse_jax()


def _refuse_pools(head_dim: int, dtype: str) -> str | None:
    if head_dim not in _HEAD_DIMS:
        return f"it serves head dims of 64 and 128, not {head_dim}"
    if dtype not in _DTYPES:
        return f"it serves KV of {', '.join(_DTYPES)}, not {dtype}"
    return None


def _refuse_jax() -> str | None:
    try:
        _kernel()
    except ImportError as error:  # jax 0.10 does not declare all that its Mosaic needs
        return f"Mosaic GPU of jax {jax.__version__} cannot be imported: {error}"
    return None


def _kernel() -> ModuleType:
    """Imported when it is needed: it may be impossible, and takes a second."""
    return importlib.import_module("pallas_kernels.paged_attention.mosaic_kernel")


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
    interpret: Any = None,
) -> jax.Array:
    """See ``api.paged_attention``.

    ``interpret`` (``mosaic_gpu.InterpretGPUParams``, from jax 0.11 on) runs it on any device, slowly.
    """
    (_, heads, head_dim), (_, block_size, kv_heads, _) = q.shape, k_cache.shape
    group = heads // kv_heads
    reason = _refuse_pools(head_dim, k_cache.dtype.name)
    if plan.tree is not None or k_scale is not None or v_scale is not None:
        reason = "it has neither tree masks nor quantised pools"
    elif block_size not in _BLOCK_SIZES:
        reason = f"it serves blocks of {', '.join(map(str, _BLOCK_SIZES))} tokens, not {block_size}"
    elif group > _MAX_GROUP:
        reason = f"it serves up to {_MAX_GROUP} query heads per KV head, not {group}"
    if reason is not None:
        raise ValueError(f"Mosaic attention cannot serve this: {reason}")
    kernel = _kernel()
    queries = min(plan.decode_queries, kernel.ROWS // group)
    tile = kernel.Tile(
        packed=-(-queries * group // 8) * 8,
        queries=queries,
        group=group,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        depth=_DEPTH[head_dim],
        interpret=interpret,
    )
    tiles = -(-plan.decode_queries // queries)
    rows, width = plan.block_tables.shape
    chunks = max_chunks(width * block_size, plan.decode_queries)
    lists = (plan.chunk, plan.chunk_row, plan.chunk_index, plan.num_chunks[None])
    inputs = (*lists, plan.query_start, plan.kv_lens, plan.block_tables)
    packed = _pack(q.astype(k_cache.dtype), plan, kv_heads, tiles * queries, queries, tile.packed)
    grid = (kv_heads, tiles, max(1, min(rows * chunks, _PROGRAMS // (kv_heads * tiles))))
    sums = kernel.launch(tile, (*inputs, packed, k_cache, v_cache), grid, chunks)
    decoded = _combine(sums, plan, heads, kv_heads, tiles, queries, window).astype(q.dtype)
    if not plan.has_prefill:
        return jnp.zeros_like(q).at[: decoded.shape[0]].set(decoded)
    others = _prefill(q, k_cache, v_cache, plan, scale=scale, window=window, soft_cap=soft_cap)
    token = jnp.arange(decoded.shape[0])[:, None, None]
    is_decode = token < plan.query_start[plan.num_decode]
    return others.at[: decoded.shape[0]].set(jnp.where(is_decode, decoded, others[: decoded.shape[0]]))


def _prefill(q: jax.Array, k_cache: jax.Array, v_cache: jax.Array, plan: AttentionPlan, **options: Any) -> jax.Array:
    """Attention of the prefill rows; zeros for all other tokens."""
    refused = triton.refuse(q.shape[2], k_cache.dtype.name, k_cache.size)
    backend = triton if refused is None else reference
    none = jnp.zeros_like(plan.num_decode)
    plan = dataclasses.replace(plan, num_decode=none, num_chunks=none)
    return backend.paged_attention(q, k_cache, v_cache, plan, **options)


def _pack(q: jax.Array, plan: AttentionPlan, kv_heads: int, most: int, queries: int, packed: int) -> jax.Array:
    """Queries of each row's first ``most`` tokens by KV head and tile: [R * K * tiles, packed, D].

    A tile has its query tokens side by side, each with its heads; behind the row's own tokens stand others.
    """
    heads, head_dim = q.shape[1:]
    rows = plan.kv_lens.shape[0]
    token = plan.query_start[:-1, None] + jnp.arange(most)
    tiles = jnp.take(q, token, axis=0, mode="clip").reshape(rows, -1, queries, kv_heads, heads // kv_heads, head_dim)
    tiles = tiles.transpose(0, 3, 1, 2, 4, 5).reshape(-1, queries * heads // kv_heads, head_dim)
    return jnp.pad(tiles, ((0, 0), (0, packed - tiles.shape[1]), (0, 0)))


def _combine(
    sums: list[jax.Array],
    plan: AttentionPlan,
    heads: int,
    kv_heads: int,
    tiles: int,
    queries: int,
    window: int | None,
) -> jax.Array:
    """Add up the chunks of each token of the decode rows: [T', H, D] float32, zeros for other tokens.

    Chunks are added one after the other, so that their sum is the same however many there could be. For those that do
    not exist the first is read again, which costs no traffic.
    """
    row = plan.token_row
    rows, group = plan.kv_lens.shape[0], heads // kv_heads
    token, head = jnp.arange(row.shape[0]), jnp.arange(heads)
    is_decode = token < plan.query_start[plan.num_decode]
    query = jnp.where(is_decode, token - plan.query_start[row], 0)
    end = plan.kv_lens[row] - (plan.query_start[row + 1] - plan.query_start[row]) + query + 1
    first = 0 if window is None else jnp.maximum(end - window, 0) // plan.chunk[row]
    slabs, packed, head_dim = sums[0].shape
    per_chunk = rows * kv_heads * tiles
    slab = (row[:, None] * kv_heads + head // group) * tiles + (query // queries)[:, None]
    lane = (query % queries)[:, None] * group + head % group

    def place(index: int) -> tuple[jax.Array, jax.Array]:
        """Where a chunk's sums of each token and head are, [..., T', H], and whether the token sees the chunk."""
        there = is_decode & (index >= first) & (index * plan.chunk[row] < end)
        return (jnp.where(there, index, first)[..., None] * per_chunk + slab) * packed + lane, there[..., None]

    # Flat, with one index: XLA gives gathers of several indices a kernel for their indices.
    part, top, total = sums[0].reshape(-1, head_dim), sums[1].reshape(-1), sums[2].reshape(-1)
    # Written out chunk by chunk: with a reduction over chunks XLA makes more kernels of it.
    places = [place(index) for index in range(slabs // per_chunk)]
    tops = [jnp.where(there, jnp.take(top, at, mode="clip"), -jnp.inf) for at, there in places]
    highest = functools.reduce(jnp.maximum, tops, jnp.full(slab.shape, MASKED))
    weights, acc = jnp.zeros(slab.shape), jnp.zeros((*slab.shape, head_dim))
    for (at, there), chunk_top in zip(places, tops, strict=True):
        keep = jnp.exp2(chunk_top - highest)
        # What no chunk has written may be NaN.
        weights += keep * jnp.where(there, jnp.take(total, at, mode="clip"), 0.0)
        acc += keep[..., None] * jnp.where(there[..., None], jnp.take(part, at, axis=0, mode="clip"), 0.0)
    return acc / jnp.maximum(weights, 1e-30)[..., None]
