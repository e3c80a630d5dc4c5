"""What a consumer of the Mosaic GPU kernel does: flash attention of a tile of queries over its share of a chunk.

* wgmma multiplies 64 rows. A decode fills few of them, with the query tokens and heads that read the same KV head. The
  others hold anything: rows of a product do not mix, and nobody copies them out.
* TMA copies whole blocks, also slots that the row does not own and that may hold NaN. Scores of such keys are masked;
  such values are set to zero in shared memory, since 0 * NaN is NaN.

Letters: M = 64 rows of the tile, N = 64 keys of a step, D head dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

__all__ = [
    "CONSUMERS",
    "KEYS",
    "NO_INDEX",
    "Q_BUFFERS",
    "ROWS",
    "Item",
    "Ref",
    "Shared",
    "Sums",
    "Tile",
    "attend",
    "slot_of",
]

Ref = Any
"""An array in the device's memory, as kernels see it; jax has no public name for the type."""

ROWS = 64
"""M: what wgmma multiplies."""
KEYS = 64
"""N: keys of a step. Blocks are no larger, and chunks are multiples of it."""
CONSUMERS = 2
"""Warpgroups that attend; they take steps in turns."""
Q_BUFFERS = 2
"""So that the queries of the next chunk are there when it begins."""
# jax 0.10 wants an index where there is none, later versions want none.
NO_INDEX: tuple[Any, ...] = ((),) if jax.__version_info__ < (0, 11) else ()
"""Arguments of ``mosaic_gpu.load`` that load a whole array."""
_MASKED = -1e30
_LOG2_E = math.log2(math.e)
_HALF = 64  # columns


@dataclass(frozen=True)
class Tile:
    """What the kernel is compiled for."""

    packed: int
    """Rows of the tile that are in use, rounded up to a multiple of 8."""
    queries: int
    """Query tokens of a tile."""
    group: int
    """Query heads per KV head."""
    scale: float
    window: int | None
    soft_cap: float | None
    depth: int
    """Stages of each consumer."""
    interpret: Any
    """Parameters of the interpreter; None on the device."""


class Shared(NamedTuple):
    """Shared memory of a thread block, and its barriers: "full" ones are what readers wait for, "free" ones writers."""

    q: Ref  # [2, M, D]
    k: Ref  # [stages, N, D]
    v: Ref
    acc: Ref  # [M, D] float32: from the second consumer to the first, and from there out
    top: Ref  # [M]
    total: Ref
    q_full: Ref
    q_free: Ref
    k_full: Ref
    k_free: Ref
    v_full: Ref
    v_free: Ref
    sums_full: Ref
    sums_free: Ref


class Item(NamedTuple):
    """A chunk, as far as the tile's queries see it."""

    slab: jax.Array  # which [packed, D] of q
    target: jax.Array  # which of the outputs
    row: jax.Array
    begin: jax.Array  # cached tokens begin .. end - 1
    end: jax.Array
    position: jax.Array  # of the tile's first query
    first_step: jax.Array  # tokens begin .. end - 1 are in steps first_step .. first_step + steps - 1
    steps: jax.Array


Sums = tuple[jax.Array, jax.Array, jax.Array]
"""Weighted sum of values [M, D], largest score [M] and sum of weights [M], in the exp2 domain."""


def attend(tile: Tile, shared: Shared, item: Item, number: jax.Array, rounds: jax.Array, consumer: int) -> Sums:
    """The consumer's half of an item's steps."""
    buffer, dim = lax.rem(number, jnp.int32(Q_BUFFERS)), shared.q.shape[2]
    plgpu.barrier_wait(shared.q_full.at[buffer])

    def body(turn: jax.Array, sums: Sums) -> Sums:
        acc, top, total = sums
        slot = slot_of(tile, rounds + turn, consumer)
        start = (item.first_step + turn * CONSUMERS + consumer) * KEYS
        plgpu.barrier_wait(shared.k_full.at[slot])

        def multiply(scores: Ref) -> jax.Array:
            plgpu.wgmma(scores, shared.q.at[buffer], _transposed(shared.k.at[slot]))
            return scores[...]

        scores = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((ROWS, KEYS), jnp.float32))
        plgpu.barrier_arrive(shared.k_free.at[slot])
        # A query that has seen nothing yet counts exp2(_MASKED - _MASKED) = 1 for every key. It is all multiplied by
        # exp2(_MASKED - …) = 0 as soon as the query sees something, here or when chunks are combined.
        scores = jnp.where(_sees(tile, item, start), _scaled(tile, scores), _MASKED)
        new_top = jnp.maximum(top, scores.max(axis=1))
        weights = jnp.exp2(scores - lax.broadcast_in_dim(new_top, scores.shape, [0]))
        keep = jnp.exp2(top - new_top)
        total = total * keep + weights.sum(axis=1)
        acc = acc * lax.broadcast_in_dim(keep, acc.shape, [0])
        plgpu.barrier_wait(shared.v_full.at[slot])
        values = shared.v.at[slot]

        @pl.when((start < item.begin) | (start + KEYS > item.end))
        def _() -> None:
            for first in range(0, dim, _HALF):  # by halves: registers are scarce
                _clear(values.at[:, pl.ds(first, _HALF)], item.begin - start, item.end - start)
            plgpu.commit_smem()

        acc = _multiply_add(tile, acc, weights.astype(shared.v.dtype), values)
        plgpu.barrier_arrive(shared.v_free.at[slot])
        return acc, new_top, total

    turns = lax.div(item.steps + (CONSUMERS - 1 - consumer), jnp.int32(CONSUMERS))
    rows = plgpu.Layout.WGMMA.reduce(1)
    start = (
        plgpu.layout_cast(jnp.full((ROWS, dim), 0.0, jnp.float32), plgpu.Layout.WGMMA),
        plgpu.layout_cast(jnp.full((ROWS,), _MASKED, jnp.float32), rows),
        plgpu.layout_cast(jnp.full((ROWS,), 0.0, jnp.float32), rows),
    )
    sums = lax.fori_loop(0, turns, body, start)
    plgpu.barrier_arrive(shared.q_free.at[buffer])
    return sums


def _scaled(tile: Tile, scores: jax.Array) -> jax.Array:
    """Products of queries and keys, as base-2 logarithms of weights."""
    if tile.soft_cap is None:
        return scores * (tile.scale * _LOG2_E)
    # tanh by exp2: the device's own tanh is good to 11 bits only. Where exp2 overflows, the quotient is 0 as it should.
    quotient = 2.0 / (1.0 + jnp.exp2(scores * (2.0 * _LOG2_E * tile.scale / tile.soft_cap)))
    return (1.0 - quotient) * (tile.soft_cap * _LOG2_E)


def _sees(tile: Tile, item: Item, start: jax.Array) -> jax.Array:
    """Which of the keys from ``start`` on the tile's rows see, [M, N]."""
    key = plgpu.broadcasted_iota(jnp.int32, (ROWS, KEYS), 1, layout=plgpu.Layout.WGMMA)
    sees = (key >= item.begin - start) & (key < item.end - start)
    if tile.queries == 1:
        return sees
    # Lane m holds query m // group. For whole numbers x <= m // group just if x * group <= m: no division.
    lane = plgpu.broadcasted_iota(jnp.int32, (ROWS, KEYS), 0, layout=plgpu.Layout.WGMMA)
    ahead = (key + (start - item.position)) * tile.group
    sees &= ahead <= lane
    if tile.window is not None:
        sees &= ahead + tile.window * tile.group > lane
    return sees


def _clear(values: Ref, begin: jax.Array, end: jax.Array) -> None:
    """Set rows outside begin .. end - 1 to zero."""
    held = plgpu.load(values, *NO_INDEX, layout=plgpu.Layout.WGMMA)
    row = plgpu.broadcasted_iota(jnp.int32, held.shape, 0, layout=plgpu.Layout.WGMMA)
    zero = plgpu.layout_cast(jnp.full(held.shape, 0.0, held.dtype), plgpu.Layout.WGMMA)
    values[...] = jnp.where((row >= begin) & (row < end), held, zero)


def _multiply_add(tile: Tile, acc: jax.Array, weights: jax.Array, values: Ref) -> jax.Array:
    """acc + weights @ values, with weights from registers."""
    if tile.interpret is not None:  # the interpreter has neither that nor sums that begin with something
        acc += jnp.dot(weights, values[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # unlike wgmma, this was a read that copies do not wait for
        return acc
    return pl.run_state(lambda ref: plgpu.wgmma(ref, weights, values))(plgpu.WGMMAAccumulatorRef.init(acc))


def _transposed(ref: Ref) -> Ref:
    if jax.__version_info__ < (0, 11):
        return plgpu.transpose_ref(ref, (1, 0))
    return ref.transpose((1, 0))


def slot_of(tile: Tile, turn: jax.Array, consumer: int | jax.Array) -> jax.Array:
    """The stage of a consumer's turn; stages of the two alternate."""
    return lax.rem(turn, jnp.int32(tile.depth)) * CONSUMERS + consumer
