"""The decode kernel of the Mosaic GPU backend, for Hopper: a warp-specialised loop over chunks of rows' caches.

A thread block has three warpgroups. One, the producer, only starts TMA copies, one for each block of the cache, into a
ring of stages in shared memory. Two consumers take the tiles of a chunk in turns and do flash attention (Dao et al.
2022, arXiv:2205.14135) with wgmma, each with its own sums; at the end of a chunk the first adds the second's to its own
and copies them out. The producer runs ahead across chunks, so copies never wait for the end of one. (The division of
labour is that of FlashAttention-3, Shah et al. 2024, arXiv:2407.08608.)

A stage has one consumer for good, and a chunk begins with the first consumer: which sums a tile goes into follows from
the chunk alone, and barriers are waited for in the order of their phases.

Letters: M = 64 rows of the tile, N = 64 keys of a step, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.mosaic_tile import (
    CONSUMERS,
    KEYS,
    NO_INDEX,
    Q_BUFFERS,
    ROWS,
    Item,
    Ref,
    Shared,
    Sums,
    Tile,
    attend,
    slot_of,
)

__all__ = ["ROWS", "Tile", "launch"]

_PRODUCER = CONSUMERS  # the warpgroup after the consumers
# Of a multiprocessor's 65536 each of 384 threads has 168 in the beginning; the producer gives up what it does not need.
_PRODUCER_REGISTERS, _CONSUMER_REGISTERS = 40, 232


class _Inputs(NamedTuple):
    chunk: Ref  # as in AttentionPlan
    chunk_row: Ref
    chunk_index: Ref
    num_chunks: Ref  # [1]
    query_start: Ref
    kv_lens: Ref
    block_tables: Ref
    q: Ref  # [R * K * tiles, packed, D]
    k: Ref  # [N, S, K, D]
    v: Ref


class _Outputs(NamedTuple):
    part: Ref  # [C * R * K * tiles, packed, D] float32, not divided by total
    top: Ref  # [C * R * K * tiles, packed]
    total: Ref


def launch(tile: Tile, inputs: tuple[jax.Array, ...], grid: tuple[int, int, int], chunks: int) -> list[jax.Array]:
    """Attend all chunks of the plan.

    Args:
        tile: sizes and options.
        inputs: chunk, chunk_row, chunk_index, num_chunks [1], query_start, kv_lens and block_tables of the plan, then
            q [R * K * tiles, packed, D] and the pools k and v [N, S, K, D].
        grid: (K, tiles of a row, programs); programs take chunks in turns.
        chunks: C, most chunks of a row.

    Returns:
        Weighted sums of values [C * R * K * tiles, packed, D], not yet divided by the sums of weights; the largest
        score and the sum of weights, each [C * R * K * tiles, packed]. All float32; scores are base-2 logarithms.
        Chunks that do not exist are not written.
    """
    q, k = inputs[-3], inputs[-2]
    slabs, dim = chunks * q.shape[0], q.shape[2]
    sums = jax.ShapeDtypeStruct((slabs, tile.packed), jnp.float32)

    def entry(*refs: Ref) -> None:
        ends = _Inputs(*refs[: len(inputs)]), _Outputs(*refs[len(inputs) :])
        scratch = _scratch(tile, dim, q.dtype, KEYS // k.shape[1])
        pl.run_scoped(lambda *shared: _program(tile, *ends, Shared(*shared)), *scratch, collective_axes="warpgroup")

    options = {} if tile.interpret is None else {"interpret": tile.interpret}
    return plgpu.kernel(
        entry,
        out_type=[jax.ShapeDtypeStruct((slabs, tile.packed, dim), jnp.float32), sums, sums],
        grid=grid,
        grid_names=("head", "tile", "program"),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name="paged_attention_mosaic_decode",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **options,
    )(*inputs)


def _scratch(tile: Tile, dim: int, dtype: jnp.dtype, copies: int) -> Shared:
    """Shared memory, laid out for wgmma; ``copies`` fill a stage."""
    halves = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    floats = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))
    stages = CONSUMERS * tile.depth
    return Shared(
        q=plgpu.SMEM((Q_BUFFERS, ROWS, dim), dtype, transforms=halves),
        k=plgpu.SMEM((stages, KEYS, dim), dtype, transforms=halves),
        v=plgpu.SMEM((stages, KEYS, dim), dtype, transforms=halves),
        acc=plgpu.SMEM((ROWS, dim), jnp.float32, transforms=floats),
        top=plgpu.SMEM((ROWS,), jnp.float32),
        total=plgpu.SMEM((ROWS,), jnp.float32),
        q_full=plgpu.Barrier(num_barriers=Q_BUFFERS),
        q_free=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=Q_BUFFERS),
        k_full=plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        k_free=plgpu.Barrier(num_barriers=stages),
        v_full=plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        v_free=plgpu.Barrier(num_barriers=stages),
        sums_full=plgpu.Barrier(),
        sums_free=plgpu.Barrier(),
    )


def _program(tile: Tile, inputs: _Inputs, outputs: _Outputs, shared: Shared) -> None:
    """One thread block: a KV head, a tile of each row's queries, and every so many'th chunk."""
    warpgroup = lax.axis_index("warpgroup")

    for consumer in range(CONSUMERS):

        @pl.when(warpgroup == consumer)
        def _(consumer: int = consumer) -> None:
            plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
            _release_all(tile, shared, consumer)

            def work(number: jax.Array, item: Item, rounds: jax.Array) -> None:
                sums = attend(tile, shared, item, number, rounds, consumer)
                if consumer == 0:
                    _write(tile, outputs, shared, item, sums)
                else:
                    _hand_over(shared, sums)

            _for_items(tile, inputs, work)
            if consumer > 0:
                plgpu.barrier_wait(shared.sums_free)

    @pl.when(warpgroup == _PRODUCER)
    def _() -> None:
        plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
        _for_items(tile, inputs, lambda number, item, rounds: _produce(tile, inputs, shared, number, item, rounds))
        _await_all(shared)


def _for_items(tile: Tile, inputs: _Inputs, work: Callable[[jax.Array, Item, jax.Array], None]) -> None:
    """Call ``work`` with the number of each of the program's items, the item, and the rounds of stages before it."""
    program, programs = lax.axis_index("program"), jnp.int32(lax.axis_size("program"))

    def body(number: jax.Array, rounds: jax.Array) -> jax.Array:
        item = _item(tile, inputs, program + number * programs)

        @pl.when(item.steps > 0)
        def _() -> None:
            work(number, item, rounds)

        return rounds + lax.div(item.steps + (CONSUMERS - 1), jnp.int32(CONSUMERS))

    lax.fori_loop(0, lax.div(inputs.num_chunks[0] - program + programs - 1, programs), body, jnp.int32(0))


def _item(tile: Tile, inputs: _Inputs, item: jax.Array) -> Item:
    head, part = lax.axis_index("head"), lax.axis_index("tile")
    row, index = inputs.chunk_row[item], inputs.chunk_index[item]
    chunk, length = inputs.chunk[row], inputs.kv_lens[row]
    count = inputs.query_start[row + 1] - inputs.query_start[row]
    first = part * tile.queries
    position = length - count + first
    begin = index * chunk
    if tile.window is not None:
        begin = jnp.maximum(begin, position - (tile.window - 1))
    # A tile without queries ends where it begins.
    end = jnp.minimum(jnp.minimum(position + tile.queries, length), (index + 1) * chunk)
    end = jnp.where(first < count, end, begin)
    first_step = lax.div(begin, jnp.int32(KEYS))
    steps = jnp.where(begin < end, lax.div(end + (KEYS - 1), jnp.int32(KEYS)) - first_step, 0)
    heads, tiles, rows = inputs.k.shape[2], lax.axis_size("tile"), inputs.kv_lens.shape[0]
    slab = (row * heads + head) * tiles + part
    return Item(slab, index * (rows * heads * tiles) + slab, row, begin, end, position, first_step, steps)


def _produce(tile: Tile, inputs: _Inputs, shared: Shared, number: jax.Array, item: Item, rounds: jax.Array) -> None:
    """Start the copies of an item, each as soon as its place is free."""
    head, block_size = lax.axis_index("head"), inputs.k.shape[1]
    blocks = KEYS // block_size
    buffer = lax.rem(number, jnp.int32(Q_BUFFERS))
    plgpu.barrier_wait(shared.q_free.at[buffer])
    target = shared.q.at[buffer, pl.ds(0, tile.packed)]
    plgpu.copy_gmem_to_smem(inputs.q.at[item.slab], target, shared.q_full.at[buffer])
    oldest, newest = lax.div(item.begin, jnp.int32(block_size)), lax.div(item.end - 1, jnp.int32(block_size))

    def body(step: jax.Array, none: None) -> None:
        slot = slot_of(tile, rounds + lax.div(step, jnp.int32(CONSUMERS)), lax.rem(step, jnp.int32(CONSUMERS)))
        first = (item.first_step + step) * blocks
        # What the row does not see of the tile is copied from a block that it does see, and masked.
        ids = [inputs.block_tables[item.row, jnp.clip(first + i, oldest, newest)] for i in range(blocks)]
        for pool, stages, free, full in (
            (inputs.k, shared.k, shared.k_free, shared.k_full),
            (inputs.v, shared.v, shared.v_free, shared.v_full),
        ):
            plgpu.barrier_wait(free.at[slot])
            for i, block in enumerate(ids):
                place = stages.at[slot, pl.ds(i * block_size, block_size)]
                plgpu.copy_gmem_to_smem(pool.at[block, :, head], place, full.at[slot])

    lax.fori_loop(0, item.steps, body, None)


def _release_all(tile: Tile, shared: Shared, consumer: int) -> None:
    """In the beginning everything is free."""
    for buffer in range(Q_BUFFERS):
        plgpu.barrier_arrive(shared.q_free.at[buffer])
    for turn in range(tile.depth):
        plgpu.barrier_arrive(shared.k_free.at[turn * CONSUMERS + consumer])
        plgpu.barrier_arrive(shared.v_free.at[turn * CONSUMERS + consumer])
    if consumer == 0:
        plgpu.barrier_arrive(shared.sums_free)


def _await_all(shared: Shared) -> None:
    """In the end everything is free again: a barrier must not be left in a phase that its waiter has not seen."""
    for barriers in (shared.q_free, shared.k_free, shared.v_free):
        for index in range(barriers.shape[0]):
            plgpu.barrier_wait(barriers.at[index])


def _hand_over(shared: Shared, sums: Sums) -> None:
    """The second consumer leaves its sums to the first."""
    plgpu.barrier_wait(shared.sums_free)
    shared.acc[...], shared.top[...], shared.total[...] = sums
    plgpu.barrier_arrive(shared.sums_full)


def _write(tile: Tile, outputs: _Outputs, shared: Shared, item: Item, sums: Sums) -> None:
    """The first consumer adds the second's sums to its own, and copies them out."""
    rows = plgpu.Layout.WGMMA.reduce(1)
    plgpu.barrier_wait(shared.sums_full)
    acc, top, total = sums
    other_acc = plgpu.load(shared.acc, *NO_INDEX, layout=plgpu.Layout.WGMMA)
    other_top, other_total = (plgpu.load(ref, *NO_INDEX, layout=rows) for ref in (shared.top, shared.total))
    new_top = jnp.maximum(top, other_top)
    keep, other_keep = jnp.exp2(top - new_top), jnp.exp2(other_top - new_top)
    shared.acc[...] = acc * lax.broadcast_in_dim(keep, acc.shape, [0]) + other_acc * lax.broadcast_in_dim(
        other_keep, acc.shape, [0]
    )
    shared.top[...] = new_top
    shared.total[...] = total * keep + other_total * other_keep
    plgpu.commit_smem()
    used = pl.ds(0, tile.packed)
    for source, target in zip((shared.acc, shared.top, shared.total), outputs, strict=True):
        plgpu.copy_smem_to_gmem(source.at[used], target.at[item.target])
    plgpu.wait_smem_to_gmem(0)
    plgpu.barrier_arrive(shared.sums_free)
