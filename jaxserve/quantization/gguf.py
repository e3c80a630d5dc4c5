"""GGUF's blocks of 32 weights, taken apart without changing a value.

A block is ``scale * q + offset`` with a float16 scale, and in some kinds a float16 offset:

    Q4_0   scale, 32 x 4 bits     q in 0..15, offset -8 * scale
    Q4_1   scale, offset, 32 x 4 bits
    Q5_0   scale, 32 fifth bits, 32 x 4 bits     q in -16..15
    Q5_1   scale, offset, 32 fifth bits, 32 x 4 bits
    Q8_0   scale, 32 x int8

K-quants have scales of scales, whose products float16 cannot hold; they are not kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxserve.quantization.blocks import Blocks
from pallas_kernels.packed_matmul import GROUP

__all__ = ["KEPT_KINDS", "from_gguf"]

Array = NDArray[Any]


def from_gguf(kind: str, rows: Array) -> Blocks:
    """Take a tensor apart.

    Args:
        kind: one of ``KEPT_KINDS``.
        rows: [O, bytes of a row] uint8, as it lies in the file.

    Returns:
        Blocks of shape [O, I], a row per output as in the file.
    """
    num_bytes, unpack = _KINDS[kind]
    return unpack(rows.reshape(rows.shape[0], -1, num_bytes))


def _q4_0(blocks: Array) -> Blocks:
    scale, q = _half(blocks, 0), _nibbles(blocks[:, :, 2:])
    with np.errstate(over="ignore"):  # looked at below
        offset = scale * np.float16(-8)
    if not np.isfinite(offset).all():
        return Blocks(_rows(q).astype(np.int8) - np.int8(8), scale, None)
    return Blocks(_rows(q), scale, offset)


def _q4_1(blocks: Array) -> Blocks:
    return Blocks(_rows(_nibbles(blocks[:, :, 4:])), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Array) -> Blocks:
    q = _nibbles(blocks[:, :, 6:]) | _fifth_bits(blocks[:, :, 2:6])
    return Blocks(_rows(q).astype(np.int8) - np.int8(16), _half(blocks, 0), None)


def _q5_1(blocks: Array) -> Blocks:
    q = _nibbles(blocks[:, :, 8:]) | _fifth_bits(blocks[:, :, 4:8])
    return Blocks(_rows(q).astype(np.int8), _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Array) -> Blocks:
    return Blocks(_rows(blocks[:, :, 2:]).view(np.int8), _half(blocks, 0), None)


_KINDS: dict[str, tuple[int, Callable[[Array], Blocks]]] = {
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q8_0": (34, _q8_0),
}
KEPT_KINDS = tuple(_KINDS)
"""Kinds whose every value survives in memory."""


def _half(blocks: Array, at: int) -> Array:
    """The float16 at byte ``at`` of each block [O, G, bytes] -> [O, G]."""
    return np.ascontiguousarray(blocks[:, :, at : at + 2]).view(np.float16)[:, :, 0]


def _nibbles(packed: Array) -> Array:
    """[O, G, 16] bytes -> [O, G, 32]: all low halves come before all high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=2)


def _fifth_bits(packed: Array) -> Array:
    """[O, G, 4] bytes, a bit per weight -> [O, G, 32] of 0 or 16."""
    return np.unpackbits(packed, axis=2, bitorder="little") << 4


def _rows(q: Array) -> Array:
    """[O, G, 32] -> [O, I], in memory of its own."""
    return np.ascontiguousarray(q).reshape(q.shape[0], q.shape[1] * GROUP)
