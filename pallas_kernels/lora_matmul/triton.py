"""NVIDIA GPU backend: two Pallas kernels that are lowered through Triton, for steps with prompts in them.

The first shrinks a tile of tokens to the adapter's rank, the second expands it. Both take their tokens through the
plan's order, so nothing is moved in memory. Inputs are split **by their number alone** for the first, which else had
one program per tile and part; the second adds the sums, in order. So a token's result does not depend on the tokens
beside it.

A slot has room for the largest rank. Of an adapter that has less only the ranks it uses are read, and a part that it
does not change is left out.

Steps of few tokens are left to XLA, which fuses the gather of adapters into two kernels (see ``reference``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import tuning
from pallas_kernels.launching import Launch, Ref, dot, load, refuse_gpu, steps_per_split, store, wide
from pallas_kernels.lora_matmul import reference
from pallas_kernels.lora_matmul.plan import TILE, LoraPlan
from pallas_kernels.lora_matmul.weights import LoraWeights

__all__ = ["Sizes", "default_sizes", "lora_matmul", "refuse"]

_LEAST_RANK = 16  # of a matrix tile
_MOST_SPLITS = 8


class Sizes(NamedTuple):
    """Sizes of the two launches and how Triton compiles them."""

    inputs: int
    """In a step of the loops, over the first factor's inputs and over those of the second, which are ranks."""
    columns: int
    """In a tile of the second."""
    num_warps: int
    num_stages: int


def refuse() -> str | None:
    """Why it cannot be used here; None if it can."""
    return refuse_gpu()


def default_sizes(rank: int, dtype: str) -> Sizes:
    """Tuned sizes for the GPU in use, adapters of this rank and x of ``dtype``.

    Shape classes are bytes of an element of x / rank, padded: "b2/r16".
    """
    return Sizes(**tuning.sizes("lora_matmul", f"b{jnp.dtype(dtype).itemsize}/r{_padded(rank)}"))


def lora_matmul(
    x: jax.Array,
    weights: LoraWeights,
    layer: jax.Array,
    plan: LoraPlan,
    *,
    sizes: Sizes | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See ``api.lora_matmul``.

    Args:
        x: as there.
        weights: as there.
        layer: as there.
        plan: as there.
        sizes: by default the tuned ones.
        interpret: run on any device, slowly, by Pallas' interpreter.
    """
    (num_tokens, size_in), parts, rank = x.shape, weights.parts, weights.rank
    if num_tokens <= reference.MOST_GATHERED:
        return reference.lora_matmul(x, weights, layer, plan)
    sizes = sizes or default_sizes(rank, x.dtype.name)
    per_split = steps_per_split(size_in, sizes.inputs, _MOST_SPLITS)
    splits, tiles = pl.cdiv(size_in, per_split * sizes.inputs), plan.tile_slot.shape[0]
    tile = _Tile(_padded(rank), sizes.inputs, sizes.columns, per_split, parts)
    layer = jnp.asarray(layer, jnp.int32)[None]
    tokens = (plan.order, plan.tile_slot, plan.tile_start, plan.tile_end, plan.num_tiles[None])
    work = _Work(*tokens, layer, weights.ranks)
    launch = partial(Launch, num_warps=sizes.num_warps, num_stages=sizes.num_stages, interpret=interpret)
    shrink = launch(partial(_shrink, tile, rank), "lora_shrink", (splits, tiles, len(parts)))
    sums = jax.ShapeDtypeStruct((splits, num_tokens, len(parts) * rank), jnp.float32)
    expand = launch(partial(_expand, tile, x.dtype), "lora_expand", (tile.column_tiles[-1], tiles))
    out = jax.ShapeDtypeStruct((num_tokens, sum(parts)), jnp.float32)
    added: jax.Array = expand(work, shrink(work, x, weights.a, out=sums), weights.b, out=out)
    return added


class _Work(NamedTuple):
    """As in ``LoraPlan``; the layer [1], and ``LoraWeights.ranks``."""

    order: Ref
    tile_slot: Ref
    tile_start: Ref
    tile_end: Ref
    num_tiles: Ref
    layer: Ref
    ranks: Ref


@dataclass(frozen=True)
class _Tile:
    """What the kernels are compiled for. Letters: M tokens of a tile, R rank, padded."""

    rank: int
    inputs: int
    columns: int
    steps: int
    """Of a split."""
    parts: tuple[int, ...]

    @property
    def column_tiles(self) -> list[int]:
        """Tiles of columns up to the end of each part; none reaches over it."""
        return list(accumulate(pl.cdiv(size, self.columns) for size in self.parts))


def _shrink(tile: _Tile, rank: int, work: _Work, x: Ref, a: Ref, out: Ref) -> None:
    """Grid (splits, tiles, parts): x @ a of a tile's tokens and a split's inputs -> out [splits, T, P * rank]."""
    split, item, part = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    slot, layer = work.tile_slot[item], work.layer[0]
    used = _ranks(work, slot, part)

    @pl.when((item < work.num_tiles[0]) & (used > 0))
    def _() -> None:
        token, there = _tokens(work, item, x.shape[0])
        lane = lax.iota(jnp.int32, tile.rank)
        real_lane, lane = lane < used, part * rank + lane

        def body(step: jax.Array, acc: jax.Array) -> jax.Array:
            inputs = step * tile.inputs + lax.iota(jnp.int32, tile.inputs)
            real = (inputs < x.shape[1])[None, :]
            rows = _read(x, (token[:, None], inputs[None, :]), there[:, None] & real)
            factor = _read(a, (slot - 1, layer, lane[:, None], inputs[None, :]), real_lane[:, None] & real)
            return acc + dot(rows, factor.astype(rows.dtype), axis=1)

        last = jnp.minimum((split + 1) * tile.steps, pl.cdiv(x.shape[1], tile.inputs))
        acc = lax.fori_loop(split * tile.steps, last, body, jnp.zeros((TILE, tile.rank), jnp.float32))
        index = (split, wide(token[:, None], acc.shape), wide(lane[None, :], acc.shape))
        store(out, index, acc, wide(there[:, None] & real_lane[None, :], acc.shape))


def _expand(tile: _Tile, dtype: jnp.dtype, work: _Work, sums: Ref, b: Ref, out: Ref) -> None:
    """Grid (tiles of columns, tiles): the sum of the splits @ b -> out [T, O]; zeros without an adapter."""
    at, item = pl.program_id(0), pl.program_id(1)
    slot, rank = work.tile_slot[item], b.shape[2]

    @pl.when(item < work.num_tiles[0])
    def _() -> None:
        token, there = _tokens(work, item, out.shape[0])
        first, end, first_lane = _part(tile, at, rank)
        column = first + lax.iota(jnp.int32, tile.columns)
        real = (column < end)[None, :]
        width, layer = min(tile.inputs, tile.rank), work.layer[0]
        num_used = _ranks(work, slot, first_lane // rank)

        def body(step: jax.Array, acc: jax.Array) -> jax.Array:
            lane = step * width + lax.iota(jnp.int32, width)
            used = lane < num_used
            mask, own = there[:, None] & used[None, :], (first_lane + lane)[None, :]
            total = _read(sums, (0, token[:, None], own), mask)
            for split in range(1, sums.shape[0]):
                total += _read(sums, (split, token[:, None], own), mask)
            factor = _read(b, (slot - 1, layer, lane[:, None], column[None, :]), used[:, None] & real)
            return acc + dot(total.astype(dtype), factor.astype(dtype))

        acc = lax.fori_loop(0, tile.rank // width, body, jnp.zeros((TILE, tile.columns), jnp.float32))
        index = (wide(token[:, None], acc.shape), wide(column[None, :], acc.shape))
        store(out, index, acc, wide(there[:, None] & real, acc.shape))


def _ranks(work: _Work, slot: jax.Array, part: jax.Array) -> jax.Array:
    """How many ranks the adapter of a slot uses for a part; 0 without an adapter."""
    return work.ranks[jnp.maximum(slot - 1, 0), work.layer[0], part] * (slot > 0).astype(jnp.int32)


def _part(tile: _Tile, at: jax.Array, rank: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """First column of a tile of columns, the end of its part's columns, and the part's first rank among all."""
    ends, tiles = list(accumulate(tile.parts)), tile.column_tiles
    # Sums and not choices: Triton's lowering takes a choice between two constants for a truth value.
    first, end, lane, shift = at * tile.columns, jnp.int32(ends[0]), jnp.int32(0), 0
    for before, after, skipped in zip(ends, ends[1:], tiles, strict=False):
        is_later = (at >= skipped).astype(jnp.int32)
        first += is_later * (before - skipped * tile.columns - shift)
        end, lane = end + is_later * (after - before), lane + is_later * rank
        shift = before - skipped * tile.columns
    return first, end, lane


def _tokens(work: _Work, item: jax.Array, num_tokens: int) -> tuple[jax.Array, jax.Array]:
    """The tile's tokens [M], out of bounds where there is none, and where there are some."""
    place = work.tile_start[item] + lax.iota(jnp.int32, TILE)
    there = place < work.tile_end[item]
    return jnp.where(there, load(work.order, place, there), num_tokens), there


def _read(ref: Ref, index: tuple[int | jax.Array, ...], mask: jax.Array) -> jax.Array:
    return load(ref, tuple(wide(i, mask.shape) if isinstance(i, jax.Array) and i.ndim else i for i in index), mask)


def _padded(rank: int) -> int:
    return max(_LEAST_RANK, pl.next_power_of_2(rank))
