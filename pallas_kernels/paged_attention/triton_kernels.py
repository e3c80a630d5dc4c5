"""The three kernels of the Triton backend: programs of a grid over ``triton_tile``'s body.

Work lists are refs like everything else; refs called ``num`` have one element.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.launching import Ref, load, store, wide
from pallas_kernels.paged_attention.plan import PREFILL_TILE
from pallas_kernels.paged_attention.triton_tile import (
    MASKED,
    Inputs,
    Tile,
    attend,
    pack_rows,
    row_index,
    visible,
)

__all__ = ["CombineWork", "DecodeWork", "PrefillWork", "combine", "decode", "prefill"]

_COMBINED = 32  # chunks that are combined at once: the same in every bucket, so that sums have one order


class PrefillWork(NamedTuple):
    """As in ``AttentionPlan``."""

    item_row: Ref
    item_start: Ref
    num_items: Ref


class DecodeWork(NamedTuple):
    """As in ``AttentionPlan``."""

    chunk: Ref
    chunk_row: Ref
    chunk_index: Ref
    num_chunks: Ref


class CombineWork(NamedTuple):
    """As in ``AttentionPlan``."""

    chunk: Ref
    token_row: Ref
    num_decode: Ref
    query_start: Ref
    kv_lens: Ref


def prefill(tile: Tile, work: PrefillWork, inputs: Inputs, out: Ref) -> None:
    """Grid (tiles of an item, K, items): one tile of query tokens, written to out [T, H, D]."""
    # The last items first: of a row they are those that see most, and long work is best begun early.
    part, kv_head, item = pl.program_id(0), pl.program_id(1), work.num_items[0] - 1 - pl.program_id(2)

    @pl.when(item >= 0)
    def _() -> None:
        row = work.item_row[item]
        start, count = work.item_start[item], inputs.query_start[row + 1] - inputs.query_start[row]
        first = start + part * tile.queries
        # The last tile of an item may be wider than what is left of it.
        last = jnp.minimum(jnp.minimum(first + tile.queries, start + PREFILL_TILE), count)

        @pl.when(first < last)
        def _() -> None:
            rows = pack_rows(tile, inputs, row, first, last, kv_head)
            begin, end = visible(tile, inputs.query_start, inputs.kv_lens, row, first, last)
            result, _ = attend(tile, inputs, row, rows, kv_head, begin, end)
            index, mask = row_index(rows, out.shape[2])
            store(out, index, result.astype(out.dtype), mask)


def decode(tile: Tile, work: DecodeWork, inputs: Inputs, part: Ref, log_total: Ref) -> None:
    """Grid (K, tiles of a row, programs): chunks of rows, written to part [C, T', H, D] and log_total [C, T', H].

    C chunks of a row, T' tokens of decode rows. What no query of the tile sees is not written.
    """
    kv_head, first, program = pl.program_id(0), pl.program_id(1) * tile.queries, pl.program_id(2)
    programs = pl.num_programs(2)

    def body(step: jax.Array, none: tuple[()]) -> tuple[()]:
        item = program + step * programs
        row, index = work.chunk_row[item], work.chunk_index[item]
        last = jnp.minimum(first + tile.queries, inputs.query_start[row + 1] - inputs.query_start[row])
        begin, end = visible(tile, inputs.query_start, inputs.kv_lens, row, first, last)
        begin = jnp.maximum(begin, index * work.chunk[row])
        end = jnp.minimum(end, (index + 1) * work.chunk[row])

        @pl.when((first < last) & (begin < end))
        def _() -> None:
            rows = pack_rows(tile, inputs, row, first, last, kv_head)
            result, total = attend(tile, inputs, row, rows, kv_head, begin, end)
            (token, head, dim), mask = row_index(rows, part.shape[3])
            store(part, (index, token, head, dim), result, mask)
            store(log_total, (index, rows.token, rows.head), total, rows.used)

        return none

    lax.fori_loop(0, lax.div(work.num_chunks[0] - program + programs - 1, programs), body, ())


def combine(tile: Tile, work: CombineWork, part: Ref, log_total: Ref, out: Ref) -> None:
    """Grid (H, tokens): the chunks of one token's head to out [T, H, D]; zeros for a token that no row owns."""
    head, token = pl.program_id(0), pl.program_id(1)
    is_decode = token < work.query_start[work.num_decode[0]]
    is_padding = token >= work.query_start[work.query_start.shape[0] - 1]

    @pl.when(is_decode | is_padding)
    def _() -> None:
        row = work.token_row[jnp.minimum(token, work.token_row.shape[0] - 1)]
        query = token - work.query_start[row]
        begin, end = visible(tile, work.query_start, work.kv_lens, row, query, query + 1)
        index = lax.iota(jnp.int32, _COMBINED)
        seen = is_decode & ((index + 1) * work.chunk[row] > begin) & (index * work.chunk[row] < end)
        totals = jnp.where(seen, load(log_total, (index, token, head), seen), MASKED)
        weights = jnp.where(seen, jnp.exp2(totals - totals.max(0)), 0.0)
        dim = lax.iota(jnp.int32, pl.next_power_of_2(out.shape[2]))
        there = dim < out.shape[2]
        shape = (_COMBINED, dim.shape[0])
        at = (wide(index[:, None], shape), token, head, wide(dim[None, :], shape))
        mask = wide(seen[:, None] & there[None, :], shape)
        parts = load(part, at, mask)
        result = (weights[:, None] * parts).sum(0) / jnp.maximum(weights.sum(0), 1.0)
        store(out, (token, head, dim), result.astype(out.dtype), there)
