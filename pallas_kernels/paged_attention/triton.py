"""NVIDIA GPU backend: Pallas kernels that are lowered through Triton.

Two launches of one body (``triton_tile``):

* **decodes and verifies**: an item is one chunk of one row's cache (flash-decoding, see ``plan``); its result and the
  softmax's denominator go to float32 partials, which a third, small kernel combines. Tiles are small (16 rows): such a
  step moves bytes, and many small programs keep more of them in flight.
* **prefill chunks**: an item is a tile of query tokens over all that they see; large tiles, no split. A plan without
  prefill rows compiles without this launch.

Grids are static and work is not, so programs for which there is none leave at once. The number of chunks is bounded
by the most that all rows could have, which may be a hundred times what they have: there the grid is cut short and its
programs take several chunks each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import tuning
from pallas_kernels.launching import Launch, refuse_gpu
from pallas_kernels.paged_attention import triton_kernels as kernels
from pallas_kernels.paged_attention.plan import PREFILL_TILE, AttentionPlan, max_chunks
from pallas_kernels.paged_attention.triton_tile import Inputs, Tile

__all__ = ["Sizes", "default_sizes", "paged_attention", "refuse"]

_FLOATS = ("float32", "bfloat16", "float16")
_QUANTISED = ("int8", "float8_e4m3fn", "float8_e5m2")
_MAX_DIM = 256
_MAX_BYTES_INDEXED = 2**31  # offsets into arrays of one-byte elements are signed 32-bit numbers up to twice this size
_PROGRAMS = 2048  # of the decode launch at most: several for each place on any chip
_MOST_ROWS = 64  # of a decode tile, when verifies have many query tokens

MakeTile = Callable[..., Tile]


class Sizes(NamedTuple):
    """Sizes of a launch: rows and keys of its tile, and how Triton compiles it."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def refuse(head_dim: int, dtype: str, num_elements: int = 0) -> str | None:
    """Why it cannot serve heads of this size and pools of this dtype and this many elements each; None if it can."""
    return refuse_gpu() or _refuse_pools(head_dim, dtype, num_elements)


def _refuse_pools(head_dim: int, dtype: str, num_elements: int) -> str | None:
    gpu = tuning.target()
    capability = 90 if gpu is None else gpu.capability
    if head_dim > _MAX_DIM:
        return f"it serves head dims up to {_MAX_DIM}, not {head_dim}"
    if dtype not in _FLOATS + _QUANTISED:
        return f"it serves KV of {', '.join(_FLOATS + _QUANTISED)}, not {dtype}"
    if dtype == "float8_e4m3fn" and capability < 89:
        return f"float8_e4m3fn needs compute capability 8.9, not {capability / 10}; int8 and float8_e5m2 do not"
    if dtype in _QUANTISED and num_elements > _MAX_BYTES_INDEXED:
        return f"a pool of {dtype} may have {_MAX_BYTES_INDEXED} elements, not {num_elements}"
    return None


def default_sizes(kind: str, head_dim: int, dtype: str) -> Sizes:
    """Tuned sizes for the GPU in use of the launch ``kind`` ("decode" or "prefill") over pools of ``dtype``.

    Shape classes are kind / bytes of an element / head dim, padded: "decode/b2/d128".
    """
    shape = f"{kind}/b{jnp.dtype(dtype).itemsize}/d{pl.next_power_of_2(head_dim)}"
    return Sizes(**tuning.sizes("paged_attention", shape))


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
    decode: Sizes | None = None,
    prefill: Sizes | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See ``api.paged_attention``.

    Args:
        decode: sizes of the decode launch; by default the tuned ones.
        prefill: sizes of the prefill launch.
        interpret: run on any device, slowly, by Pallas' interpreter.
    """
    head_dim, dtype = q.shape[2], k_cache.dtype
    reason = _refuse_pools(head_dim, dtype.name, k_cache.size)
    if reason is not None:
        raise ValueError(f"Triton attention cannot serve this: {reason}")
    rows = (plan.query_start, plan.kv_lens, plan.block_tables, plan.tree, plan.depth)
    inputs = Inputs(q, k_cache, v_cache, k_scale, v_scale, *rows)
    tile = partial(
        Tile,
        group=q.shape[1] // k_cache.shape[2],
        dtype=_multiplied(q.dtype, dtype),
        scale=scale,
        window=window,
        soft_cap=soft_cap,
    )
    decode = decode or default_sizes("decode", head_dim, dtype.name)
    out = None
    if plan.has_prefill:
        prefill = prefill or default_sizes("prefill", head_dim, dtype.name)
        out = _prefill(inputs, plan, tile, prefill, interpret)
    return _decode(inputs, plan, out, tile, decode, interpret)


def _multiplied(q: jnp.dtype, pool: jnp.dtype) -> jnp.dtype:
    """Quantised values are exact in bfloat16; their scaled weights could be too small for float16."""
    if pool.itemsize > 1:
        return jnp.promote_types(q, pool)
    return jnp.dtype(jnp.float32 if q == jnp.float32 else jnp.bfloat16)


def _prefill(inputs: Inputs, plan: AttentionPlan, make_tile: MakeTile, sizes: Sizes, interpret: bool) -> jax.Array:
    """Attention of the prefill rows; zeros for all other tokens."""
    kv_heads = inputs.k.shape[2]
    group = inputs.q.shape[1] // kv_heads
    tile = make_tile(rows=max(sizes.rows, pl.next_power_of_2(group)), keys=sizes.keys, tree=False)
    work = kernels.PrefillWork(plan.item_row, plan.item_start, plan.num_items[None])
    # Tiles of one item next to each other: they read the same keys.
    grid = (pl.cdiv(PREFILL_TILE, tile.queries), kv_heads, plan.item_row.shape[0])
    prefill = partial(kernels.prefill, tile)
    launch = Launch(prefill, "paged_attention_prefill", grid, sizes.num_warps, sizes.num_stages, interpret)
    return launch(work, inputs._replace(tree=None, depth=None), out=jnp.zeros_like(inputs.q))


def _decode(
    inputs: Inputs, plan: AttentionPlan, out: jax.Array | None, make_tile: MakeTile, sizes: Sizes, interpret: bool
) -> jax.Array:
    """Attention of the decode rows, written into ``out``; without it, zeros for all other tokens."""
    (num_tokens, heads, head_dim), (_, block_size, kv_heads, _) = inputs.q.shape, inputs.k.shape
    num_rows, width = plan.block_tables.shape
    packed = pl.next_power_of_2(plan.decode_queries * heads // kv_heads)
    rows = max(sizes.rows, min(packed, _MOST_ROWS), pl.next_power_of_2(heads // kv_heads))
    tile = make_tile(rows=rows, keys=sizes.keys, tree=plan.tree is not None)
    tiles = pl.cdiv(plan.decode_queries, tile.queries)
    chunks = max_chunks(width * block_size, plan.decode_queries)
    decodes = plan.token_row.shape[0]
    # Heads next to each other: they are neighbours in a block.
    grid = (kv_heads, tiles, min(num_rows * chunks, pl.cdiv(_PROGRAMS, kv_heads * tiles)))
    decode = partial(kernels.decode, tile)
    launch = Launch(decode, "paged_attention_decode", grid, sizes.num_warps, sizes.num_stages, interpret)
    part = jax.ShapeDtypeStruct((chunks, decodes, heads, head_dim), jnp.float32)
    parts = launch(
        kernels.DecodeWork(plan.chunk, plan.chunk_row, plan.chunk_index, plan.num_chunks[None]),
        inputs,
        out=(part, jax.ShapeDtypeStruct(part.shape[:3], jnp.float32)),
    )
    work = kernels.CombineWork(plan.chunk, plan.token_row, plan.num_decode[None], plan.query_start, plan.kv_lens)
    tokens = num_tokens if out is None else decodes
    combine = Launch(partial(kernels.combine, tile), "paged_attention_combine", (heads, tokens), 4, 1, interpret)
    whole = jax.ShapeDtypeStruct(inputs.q.shape, inputs.q.dtype) if out is None else out
    return combine(work, *parts, out=whole)
