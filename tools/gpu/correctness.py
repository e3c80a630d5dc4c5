"""Every kernel against an answer in float64 on the host, over pools whose unowned slots hold NaN.

The cases of attention are made as those of the tests are (``tests/kernels/cases.py``), in the shapes that models have
and with contexts that the interpreter is too slow for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from gpu.products import Adapters, random_adapters, random_vectors, random_weight
from gpu.results import Result
from gpu.session import Session, short
from gpu.timing import in_threads
from pallas_kernels.lora_matmul import make_plan
from pallas_kernels.packed_matmul import unpack
from pallas_kernels.paged_attention import Backend
from tests.kernels.cases import AttentionCase, attend

__all__ = ["kernels_are_right"]

# Largest error of an element, by the dtype of what is multiplied: keys and values are normal, results at most as large.
_TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 4e-3}

# Of products, as a share of the sum of absolute products: a weight is rounded to the dtype.
_PRODUCT_TOLERANCE = {"float32": 4e-6, "bfloat16": 2.0**-9, "float16": 2.0**-12 + 4e-6}

_MIXED = ((1, 9), (1, 600), (1, 2500), (4, 4), (20, 41), (130, 700), (300, 300))
_DECODES = ((1, 1), (1, 16), (1, 900), (1, 5000), (1, 20000))  # the last has more than one chunk size's worth of chunks
_VERIFIES = ((1, 20), (5, 600), (8, 8), (3, 4131), (70, 90))
_LLAMA: dict[str, Any] = {"heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
_SMOLLM: dict[str, Any] = {"heads": 9, "kv_heads": 3, "head_dim": 64, "dtype": "bfloat16"}

# Name -> rows, has_prefill, properties.
_CASES: dict[str, tuple[tuple[tuple[int, int], ...], bool, dict[str, Any]]] = {
    "decode, 32/8 heads of 128": (_DECODES, False, _LLAMA),
    "decode, 9/3 heads of 64": (_DECODES, False, _SMOLLM),
    "decode, window": (_DECODES, False, {**_LLAMA, "window": 1000}),
    "verify": (_VERIFIES, True, {**_LLAMA, "decode_queries": 8}),
    "verify of trees": (_VERIFIES, True, {**_LLAMA, "decode_queries": 8, "tree": True}),
    "verify of trees of 40": (
        ((40, 300), (1, 7), (33, 40)),
        True,
        {**_LLAMA, "decode_queries": 40, "tree": True, "window": 99},
    ),
    "prefill": (((300, 300), (64, 1000), (129, 129)), True, _LLAMA),
    "mixed": (_MIXED, True, _LLAMA),
    "mixed, 9/3 heads of 64": (_MIXED, True, _SMOLLM),
    "mixed, window and soft cap": (_MIXED, True, {**_LLAMA, "window": 64, "soft_cap": 20.0}),
    "mixed, heads of 80, blocks of 24": (_MIXED, True, {**_LLAMA, "heads": 8, "head_dim": 80, "block_size": 24}),
    "mixed, heads of 256": (_MIXED, True, {**_LLAMA, "heads": 8, "kv_heads": 4, "head_dim": 256}),
    "mixed, float32": (_MIXED, True, {**_SMOLLM, "dtype": "float32"}),
    "mixed, float16": (_MIXED, True, {**_LLAMA, "dtype": "float16"}),
    "mixed, int8 pools": (_MIXED, True, {**_LLAMA, "pool_dtype": "int8"}),
    "mixed, float8_e4m3fn pools": (_MIXED, True, {**_LLAMA, "pool_dtype": "float8_e4m3fn"}),
    "mixed, float8_e5m2 pools": (_MIXED, True, {**_LLAMA, "pool_dtype": "float8_e5m2"}),
}

_HALVES: dict[str, Any] = {"heads": 9, "kv_heads": 3, "head_dim": 64, "dtype": "float16"}
_BY_MOSAIC = {
    "decode, 32/8 heads of 128": (_DECODES, False, _LLAMA),
    "decode, 9/3 heads of 64, float16, window": (_DECODES, False, {**_HALVES, "window": 1000}),
    "verify, soft cap": (_VERIFIES, True, {**_LLAMA, "decode_queries": 8, "soft_cap": 20.0}),
}

_SMALL: dict[str, Any] = {"heads": 6, "kv_heads": 2, "head_dim": 32, "dtype": "bfloat16"}
_DRY = {
    "mixed, trees, window and soft cap, int8 pools": (
        ((1, 300), (5, 60), (20, 41)),
        True,
        {**_SMALL, "decode_queries": 8, "tree": True, "window": 30, "soft_cap": 20.0, "pool_dtype": "int8"},
    ),
}
_DRY_BY_MOSAIC = {
    "verify, window": (((1, 70), (4, 30)), False, {**_SMALL, "head_dim": 64, "decode_queries": 4, "window": 40}),
}

# Kind, T, I, O, dtype.
_PRODUCTS = (
    ("int4", 1, 4096, 4096, "bfloat16"),
    ("int4", 17, 14336, 4096, "bfloat16"),
    ("int4", 200, 4096, 6144, "float16"),
    ("int4", 1000, 576, 1000, "bfloat16"),
    ("int4", 5, 2208, 50, "float32"),
    ("int8", 1, 4096, 4096, "bfloat16"),
    ("int8", 64, 576, 1530, "float32"),
    ("int8", 700, 2208, 4096, "float16"),
)
_DRY_PRODUCTS = (("int4", 3, 96, 50, "bfloat16"),)

# T, I, r, O, dtype.
_ADAPTERS = (
    (512, 4096, 16, 4096, "bfloat16"),
    (130, 14336, 64, 4096, "bfloat16"),
    (100, 576, 8, 1530, "float16"),
    (300, 1200, 256, 64, "float32"),
)
_DRY_ADAPTERS = ((70, 96, 8, 40, "float32"),)


def kernels_are_right(session: Session) -> Iterator[Result]:
    """One check for each case; one that does not compile has not passed either."""
    cases = _DRY if session.dry else _CASES
    by_mosaic = {} if session.mosaic is None else _DRY_BY_MOSAIC if session.dry else _BY_MOSAIC
    products, adapters = (_DRY_PRODUCTS, _DRY_ADAPTERS) if session.dry else (_PRODUCTS, _ADAPTERS)
    checks: dict[str, Callable[[], tuple[float, float]]] = {
        **{f"attention: {name}": partial(_attention, session, session.attention, *c) for name, c in cases.items()},
        **{
            f"attention by Mosaic: {name}": partial(_attention, session, session.mosaic, *case)
            for name, case in by_mosaic.items()
        },
        **{f"{case[0]} product: {case[1:]}": partial(_product, session, *case) for case in products},
        **{f"adapters: {case}": partial(_lora, session, *case) for case in adapters},
    }
    yield from _results(in_threads(checks, session.threads))


def _attention(
    session: Session,
    backend: Backend,
    rows: tuple[tuple[int, int], ...],
    has_prefill: bool,
    properties: dict[str, Any],
) -> tuple[float, float]:
    case = AttentionCase(rows, **properties)
    out = attend(case, backend, has_prefill=has_prefill, optimised=not session.dry)
    return float(np.abs(out - case.expected()).max()), _TOLERANCE[case.dtype]


def _product(session: Session, kind: str, tokens: int, size_in: int, size_out: int, dtype: str) -> tuple[float, float]:
    x, weight = random_vectors(tokens, size_in, dtype), random_weight(kind, size_in, size_out)
    out = _run(session, session.packed_matmul, x, weight)
    exact = np.asarray(unpack(weight)).astype(np.float64)
    x64 = np.asarray(x).astype(np.float64)
    return _share(out, x64 @ exact, np.abs(x64) @ np.abs(exact)), _PRODUCT_TOLERANCE[dtype]


def _lora(session: Session, tokens: int, size_in: int, rank: int, size_out: int, dtype: str) -> tuple[float, float]:
    x, adapters = random_vectors(tokens, size_in, dtype), random_adapters(tokens, size_in, rank, size_out, dtype)

    def run(x: jax.Array, adapters: Adapters) -> jax.Array:
        plan = make_plan(adapters.slots, adapters.weights.a.shape[0] + 1)
        return session.lora_matmul(x, adapters.weights, jax.numpy.int32(0), plan)

    out, worst = _run(session, run, x, adapters), 0.0
    factors = (x, adapters.weights.a[:, 0].swapaxes(1, 2), adapters.weights.b[:, 0])
    x64, a, b = (np.asarray(array).astype(np.float64) for array in factors)
    slots = np.asarray(adapters.slots)
    for slot in np.unique(slots[slots > 0]):
        mine, first, second = slots == slot, a[slot - 1], b[slot - 1]
        exact, largest = x64[mine] @ first @ second, np.abs(x64[mine]) @ np.abs(first) @ np.abs(second)
        worst = max(worst, _share(out[mine], exact, largest))
    if out[slots == 0].any():  # NaN is something, too
        raise ValueError("a token without an adapter was given something")
    return worst, 2 * _PRODUCT_TOLERANCE[dtype]


def _run(session: Session, function: Callable[..., jax.Array], *args: Any) -> NDArray[np.float32]:
    return np.asarray(session.compile(function, *args)(*args))


def _share(out: NDArray[Any], exact: NDArray[Any], largest: NDArray[Any]) -> float:
    """The largest error as a share of the sum of the absolute products; infinite where there is a NaN."""
    return float(np.nan_to_num(np.abs(out - exact) / largest, nan=np.inf).max())


def _results(checked: dict[str, tuple[float, float] | Exception]) -> Iterator[Result]:
    """From (error, tolerance), or what a check raised."""
    for name, found in checked.items():
        if isinstance(found, Exception):
            yield Result(name, correct=False, note=short(found))
        else:
            error, tolerance = found
            yield Result(name, {"error": error, "allowed": tolerance}, correct=bool(error <= tolerance))
