"""Attention of prompt chunks, alone and beside decodes: operations per second against the chip's matrix units."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial

from gpu.ragged import BLOCK_SIZE, Heads, Pools, Rows, chain, make_batch, make_pools
from gpu.results import Result
from gpu.session import Session
from gpu.timing import measure
from jaxserve.roofline import MODELS, Precision, StepShape, step_work

__all__ = ["prefill_speed"]

_MODEL = MODELS["llama-3.1-8b"]
_HEADS, _DRY_HEADS = Heads(_MODEL.num_heads, _MODEL.num_kv_heads, _MODEL.head_dim), Heads(4, 2, 32)
_SECONDS = 4.0  # that a shape takes, compiling it included

_SHAPES: Mapping[str, Rows] = {
    "a prompt of 2048": [(2048, 2048)],
    "a chunk of 2048 after 8192": [(2048, 10240)],
    "a chunk of 512 after 32256": [(512, 32768)],
    "4 chunks of 512 after 3584": [(512, 4096)] * 4,
    "a chunk of 512 beside 63 decodes at 2048": [*([(1, 2048)] * 63), (512, 2048)],
}
_DRY: Mapping[str, Rows] = {"a chunk of 40 beside a decode": [(1, 30), (40, 70)]}


def prefill_speed(session: Session) -> Iterator[Result]:
    """Time per call, and operations per second of the chunks."""
    heads, shapes = (_DRY_HEADS, _DRY) if session.dry else (_HEADS, _SHAPES)
    blocks = max(sum(-(-tokens // BLOCK_SIZE) for _, tokens in rows) for rows in shapes.values())
    pools = make_pools(2 * blocks + 1, heads)
    for what, rows in shapes.items():
        if session.clock.left < _SECONDS:
            yield Result(what, note="no time left")
            continue
        yield _shape(session, what, rows, heads, pools)


def _shape(session: Session, what: str, rows: Rows, heads: Heads, pools: Pools) -> Result:
    batch = make_batch(rows, pools, heads, calls=1 if session.dry else 4)
    program = session.compile(chain(session.attention, has_prefill=True), batch, pools)
    timing = measure(partial(program, batch, pools), calls=len(batch.tables))
    rate = _operations(rows, heads) / timing.seconds
    figures = {"µs": 1e6 * timing.seconds, "TFLOP/s": rate / 1e12, "% spread": 100 * timing.spread}
    peak = session.chip.speed("bfloat16")
    if math.isfinite(peak):
        figures["% of the matrix units"] = 100 * rate / peak
    return Result(what, figures)


def _operations(rows: Rows, heads: Heads) -> float:
    """Of all prompt chunks."""
    found = 0.0
    for queries, tokens in rows:
        if queries > 1:
            works = step_work(_MODEL, StepShape(decodes=0, chunk=queries, before=tokens - queries), Precision())
            per_layer = next(work.operations for work in works if work.name == "prefill attention")
            found += per_layer * heads.heads * heads.head_dim / (_MODEL.num_heads * _MODEL.head_dim)
    return found
