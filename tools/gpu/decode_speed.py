"""Attention of decodes: bytes of keys and values per second, against a copy and against attention without a kernel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import jax
import numpy as np

from gpu.ragged import BLOCK_SIZE, Batch, Heads, Pools, Rows, chain, gather_attention, kv_bytes, make_batch, make_pools
from gpu.results import Result, Target
from gpu.session import Session, short
from gpu.timing import in_threads, measure
from pallas_kernels.paged_attention import Backend, reference

__all__ = ["decode_main", "decode_rest"]

_HEADS, _DRY_HEADS = Heads(32, 8, 128), Heads(4, 2, 64)
_MOSAIC = "Mosaic kernel"
_SHARE, _TIMES = 85, 5
_LARGE_BATCH, _LONG_CONTEXT = 32, 2048  # from here on a chip has enough to do for the share that is asked
# Without a kernel, what is gathered and the scores are written to memory and read again: not for more bytes than these.
_GATHERED = 4 << 30
_REFERENCE_ROWS = 64 * 2048  # the reference's loops take milliseconds per thousand tokens
_POOL_SHARE = 0.25  # of the memory that is free
_SECONDS = 3.0  # that a shape takes, compiling it included


def _skewed(rows: int, mean: int) -> Rows:
    """Lengths like those of a running server: most short, a few long."""
    lens = np.random.default_rng(rows).lognormal(sigma=1.2, size=rows)
    return [(1, int(length)) for length in np.sort(np.clip(lens * mean / lens.mean(), 16, 16 * mean))]


def _even(rows: int, context: int) -> Rows:
    return [(1, context)] * rows


_MAIN: Mapping[str, Rows] = {
    **{f"{b} × {c}": _even(b, c) for b, c in ((32, 2048), (32, 4096), (64, 2048), (128, 2048), (1, 32768), (1, 2048))},
    "64 of 2048, skewed": _skewed(64, 2048),
    "63 of 1024, one of 32768": [*_even(63, 1024), (1, 32768)],
}
_REST: Mapping[str, Rows] = {
    f"{b} × {c}": _even(b, c) for c in (4096, 1024, 32768, 2048) for b in (128, 64, 32, 1) if f"{b} × {c}" not in _MAIN
}
_DRY: Mapping[str, Rows] = {"3 of 40, skewed": _skewed(3, 40)}


def decode_main(session: Session) -> Iterator[Result]:
    """The shapes that matter most."""
    if session.no_mosaic:
        yield Result(f"the {_MOSAIC}", note=f"skipped: {session.no_mosaic}")
    yield from _shapes(session, _DRY if session.dry else _MAIN)


def decode_rest(session: Session) -> Iterator[Result]:
    """All other batches and contexts, and 1-byte pools."""
    if session.dry:
        return
    yield from _shapes(session, _REST)
    yield from _shapes(session, {"64 × 4096": _even(64, 4096)}, dtype="int8")


def _shapes(session: Session, shapes: Mapping[str, Rows], dtype: str = "bfloat16") -> Iterator[Result]:
    heads = _DRY_HEADS if session.dry else _HEADS
    pools = make_pools(_num_blocks(session, shapes, heads), heads, dtype)
    for name, rows in shapes.items():
        what = f"{name}, {pools.k.dtype}"
        if session.clock.left < _SECONDS:
            yield Result(what, note="no time left")
            continue
        try:
            batch = make_batch(rows, pools, heads, calls=2 if session.dry else None)
        except ValueError as error:
            yield Result(what, note=str(error))
            continue
        yield from _shape(session, what, rows, batch, pools)


def _num_blocks(session: Session, shapes: Mapping[str, Rows], heads: Heads) -> int:
    """As many blocks as two calls of the largest shape take, if there is room."""
    largest = max(sum(-(-tokens // BLOCK_SIZE) for _, tokens in rows) for rows in shapes.values())
    stats = None if session.dry else jax.devices()[0].memory_stats()
    if not stats:
        return 2 * largest + 1
    room = _POOL_SHARE * (stats["bytes_limit"] - stats["bytes_in_use"])
    block = 2 * 2 * BLOCK_SIZE * heads.kv_heads * heads.head_dim
    return min(2 * largest, int(room / block)) + 1


def _shape(session: Session, what: str, rows: Rows, batch: Batch, pools: Pools) -> Iterator[Result]:
    """The kernel, then what it is compared with, where that is affordable."""
    size, backends = kv_bytes(rows, pools), {"kernel": session.attention}
    padded = len(rows) * max(tokens for _, tokens in rows) / sum(tokens for _, tokens in rows)
    if not pools.scales and size * padded <= _GATHERED:
        backends["gather"] = gather_attention
    if not pools.scales and session.mosaic is not None:
        backends[_MOSAIC] = session.mosaic
    if size * padded <= _GATHERED and sum(tokens for _, tokens in rows) <= _REFERENCE_ROWS:
        backends["reference"] = reference.paged_attention
    compiled = in_threads(
        {name: partial(_compile, session, backend, batch, pools) for name, backend in backends.items()}, session.threads
    )
    seconds: dict[str, float] = {}
    for name, program in compiled.items():
        if isinstance(program, Exception):
            yield Result(f"{what}: {name}", note=short(program))
            continue
        own = batch if name != "reference" else _few_calls(batch)
        try:
            repeats = 1 if session.dry else 7 if name == "kernel" else 3
            timing = measure(partial(program, own, pools), calls=len(own.tables), repeats=repeats)
        except Exception as error:  # out of memory, above all: the comparison is lost, the kernel's figure is not
            yield Result(f"{what}: {name}", note=short(error))
            continue
        seconds[name] = timing.seconds
        if name == "kernel":
            targets = (Target("% of copy", least=_SHARE),) if _asked(rows) else ()
            figures = {**session.moved(size, timing.seconds), "% spread": 100 * timing.spread}
            yield Result(what, figures, targets)
        elif "kernel" in seconds:
            times = f"× the {name}"
            targets = (Target(times, least=_TIMES),) if name == "gather" and _asked(rows) else ()
            figures = {f"µs of the {name}": 1e6 * timing.seconds, times: timing.seconds / seconds["kernel"]}
            yield Result(f"{what}: against the {name}", figures, targets)


def _compile(session: Session, backend: Backend, batch: Batch, pools: Pools) -> jax.stages.Compiled:
    own = _few_calls(batch) if backend is reference.paged_attention else batch
    options = session.compiler_options if backend in (session.attention, session.mosaic) else {}
    return jax.jit(chain(backend, has_prefill=False)).lower(own, pools).compile(options)


def _few_calls(batch: Batch) -> Batch:
    return batch._replace(tables=batch.tables[:2])


def _asked(rows: Rows) -> bool:
    """Whether a share of the copy's rate is asked of this shape."""
    return len(rows) >= _LARGE_BATCH and sum(tokens for _, tokens in rows) >= len(rows) * _LONG_CONTEXT
