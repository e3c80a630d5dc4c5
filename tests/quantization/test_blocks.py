"""GGUF's blocks mean what the gguf package says, and keep it when they are packed and put side by side."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from jaxserve.quantization import KEPT_KINDS, from_gguf, merge
from pallas_kernels.packed_matmul import unpack

HALVES = {"Q4_1": 2, "Q5_1": 2}  # float16 numbers at the head of a block; one in all other kinds


def random_rows(kind: str, num_out: int, groups: int, *, largest: float = 4.0, seed: int = 0) -> NDArray[np.uint8]:
    """Rows of random blocks: every bit pattern of q; scales of both signs, zeros and subnormal ones among them."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (num_out, groups, GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]), dtype=np.uint8)
    halves = rng.uniform(-largest, largest, (num_out, groups, HALVES.get(kind, 1))).astype(np.float16)
    halves[::5] *= np.float16(1e-6)
    halves[3] = 0
    raw[:, :, : 2 * halves.shape[2]] = halves.view(np.uint8)
    return raw.reshape(num_out, -1)


def values_of(kind: str, rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    """[O, I] by the gguf package."""
    return dequantize(rows, GGMLQuantizationType[kind])


def same(a: Any, b: Any) -> bool:
    return a.dtype == b.dtype == np.float32 and np.array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("kind", KEPT_KINDS)
def test_packed_blocks_are_the_values_of_the_file(kind: str) -> None:
    rows = random_rows(kind, num_out=37, groups=3)
    blocks = from_gguf(kind, rows)
    assert blocks.q.shape == (37, 96)
    assert blocks.q.dtype == (np.uint8 if kind in ("Q4_0", "Q4_1") else np.int8)
    assert same(unpack(blocks.map(np.transpose).pack()), values_of(kind, rows).T)


def test_scales_whose_offset_passes_float16_are_kept_without_one() -> None:
    rows = random_rows("Q4_0", num_out=20, groups=2, largest=60000.0)
    blocks = from_gguf("Q4_0", rows)
    assert blocks.offset is None
    assert same(unpack(blocks.map(np.transpose).pack()), values_of("Q4_0", rows).T)


@pytest.mark.parametrize("kinds", [*itertools.combinations_with_replacement(KEPT_KINDS, 2), KEPT_KINDS], ids="-".join)
def test_unlike_kinds_side_by_side_lose_nothing(kinds: tuple[str, ...]) -> None:
    rows = [random_rows(kind, num_out=4 + 7 * i, groups=2, seed=i) for i, kind in enumerate(kinds)]
    merged = merge([from_gguf(kind, row).map(np.transpose) for kind, row in zip(kinds, rows, strict=True)])
    values = np.concatenate([values_of(kind, row) for kind, row in zip(kinds, rows, strict=True)])
    assert (merged.q.dtype == np.uint8) == (set(kinds) <= {"Q4_0", "Q4_1"})
    assert same(unpack(merged.pack()), values.T)
