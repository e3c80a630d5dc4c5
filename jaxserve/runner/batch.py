"""A step's plan as padded arrays.

Rows are put in the order that attention wants: rows with few tokens (decodes, verifies) first, by length, so that rows
of one group take equally long; then the others. The arrays are new in every step: jax on CPU may use them in place, so
one that is reused would change under a running step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from flax import struct
from numpy.typing import NDArray

from jaxserve.plan import DEVICE_TOKEN, RowPlan, StepPlan
from jaxserve.runner.buckets import Bucket, Buckets

__all__ = ["StepInput", "make_step_input", "order_rows", "pad_tables"]


@struct.dataclass
class StepInput:
    """Input of ``programs.forward``; numpy int32 on the way in. T, R from the bucket; B blocks per row.

    Attributes:
        tokens: [T] token ids; DEVICE_TOKEN for the row's newest sampled token, DEVICE_TOKEN - j for its j-th draft.
        token_rows: [T] index of each token's row in this step.
        query_start: [R + 1] first token of each row; the last entry is the number of real tokens.
        rows: [R] index of each row in the device state.
        start: [R] position of each row's first token, -1 for that of its newest sampled token.
        block_tables: [R, B].
        outputs: [min(T, P)] tokens after which something is sampled, in the order of places; P is the most places.
        num_decode: [] how many rows, from the first, have at most as many tokens as a verify.
    """

    tokens: Any
    token_rows: Any
    query_start: Any
    rows: Any
    start: Any
    block_tables: Any
    outputs: Any
    num_decode: Any


def order_rows(plan: StepPlan, most_queries: int) -> list[RowPlan]:
    """The plan's rows in the order in which a step holds them; ``most_queries`` is the most tokens of a verify."""
    return sorted(plan.rows, key=lambda row: (row.num_tokens > most_queries, row.start))


def make_step_input(ordered: list[RowPlan], bucket: Bucket, *, max_blocks: int, buckets: Buckets) -> StepInput:
    """Pad rows (in ``order_rows`` order) to one of ``buckets``; ``max_blocks`` is B."""
    counts = [row.num_tokens for row in ordered]
    num_tokens = sum(counts)
    tokens = np.zeros(bucket.tokens, np.int32)
    tokens[:num_tokens] = [token for row in ordered for token in _tokens(row)]
    token_rows = np.zeros(bucket.tokens, np.int32)
    token_rows[:num_tokens] = np.repeat(np.arange(len(ordered)), counts)
    query_start = np.full(bucket.rows + 1, num_tokens, np.int32)
    query_start[: len(ordered) + 1] = np.concatenate([[0], np.cumsum(counts)])
    rows = np.full(bucket.rows, buckets.max_rows, np.int32)
    rows[: len(ordered)] = [row.row for row in ordered]
    start = np.zeros(bucket.rows, np.int32)
    start[: len(ordered)] = [-1 if row.tokens[0] == DEVICE_TOKEN else row.start for row in ordered]
    places = [
        at
        for row, end in zip(ordered, query_start[1:].tolist(), strict=False)
        if row.samples
        for at in range(end - 1 - row.num_drafts, end)
    ]
    outputs = np.zeros(min(bucket.tokens, buckets.max_places), np.int32)
    outputs[: len(places)] = places
    return StepInput(
        tokens=tokens,
        token_rows=token_rows,
        query_start=query_start,
        rows=rows,
        start=start,
        block_tables=pad_tables(ordered, bucket.rows, max_blocks),
        outputs=outputs,
        num_decode=np.int32(sum(count <= bucket.queries for count in counts)),
    )


def pad_tables(rows: Sequence[RowPlan], size: int, max_blocks: int) -> NDArray[np.int32]:
    """The block tables [size, max_blocks] of rows."""
    tables = np.zeros((size, max_blocks), np.int32)
    for i, row in enumerate(rows):
        tables[i, : len(row.block_ids)] = row.block_ids
    return tables


def _tokens(row: RowPlan) -> tuple[int, ...]:
    return row.tokens + tuple(DEVICE_TOKEN - j for j in range(1, row.num_drafts + 1))


assert DEVICE_TOKEN < 0, "programs.forward tells it from a token id by its sign"
