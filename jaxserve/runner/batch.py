"""A step's plan as padded arrays.

Rows are put in the order that attention wants: rows with one token (decodes) first, by length, so that rows of one
group take equally long; then the others. The arrays are new in every step: jax on CPU may use them in place, so one
that is reused would change under a running step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from flax import struct

from jaxserve.plan import DEVICE_TOKEN, RowPlan, StepPlan
from jaxserve.runner.buckets import Bucket

__all__ = ["StepInput", "make_step_input", "order_rows"]


@struct.dataclass
class StepInput:
    """Input of ``programs.forward``; numpy int32 on the way in. T, R from the bucket; B blocks per row.

    Attributes:
        tokens: [T] token ids; DEVICE_TOKEN for the row's newest sampled token.
        token_rows: [T] index of each token's row in this step.
        query_start: [R + 1] first token of each row.
        rows: [R] index of each row in the device state.
        start: [R] position of each row's first token.
        block_tables: [R, B].
        num_decode: [] how many rows, from the first, have one token.
        num_tokens: [] how many tokens are real.
    """

    tokens: Any
    token_rows: Any
    query_start: Any
    rows: Any
    start: Any
    block_tables: Any
    num_decode: Any
    num_tokens: Any


def order_rows(plan: StepPlan) -> list[RowPlan]:
    """The plan's rows in the order in which a step holds them."""
    return sorted(plan.rows, key=lambda row: (row.num_tokens > 1, row.start))


def make_step_input(ordered: list[RowPlan], bucket: Bucket, *, max_blocks: int, dummy_row: int) -> StepInput:
    """Pad rows (in ``order_rows`` order) to a bucket; ``max_blocks`` is B."""
    counts = [row.num_tokens for row in ordered]
    num_tokens = sum(counts)
    tokens = np.zeros(bucket.tokens, np.int32)
    tokens[:num_tokens] = [token for row in ordered for token in row.tokens]
    token_rows = np.zeros(bucket.tokens, np.int32)
    token_rows[:num_tokens] = np.repeat(np.arange(len(ordered)), counts)
    query_start = np.full(bucket.rows + 1, num_tokens, np.int32)
    query_start[: len(ordered) + 1] = np.concatenate([[0], np.cumsum(counts)])
    rows = np.full(bucket.rows, dummy_row, np.int32)
    rows[: len(ordered)] = [row.row for row in ordered]
    start = np.zeros(bucket.rows, np.int32)
    start[: len(ordered)] = [row.start for row in ordered]
    tables = np.zeros((bucket.rows, max_blocks), np.int32)
    for i, row in enumerate(ordered):
        tables[i, : len(row.block_ids)] = row.block_ids
    return StepInput(
        tokens=tokens,
        token_rows=token_rows,
        query_start=query_start,
        rows=rows,
        start=start,
        block_tables=tables,
        num_decode=np.int32(sum(count == 1 for count in counts)),
        num_tokens=np.int32(num_tokens),
    )


assert DEVICE_TOKEN < 0, "programs.forward tells it from a token id by its sign"
