"""Quantised matrices on the host, before they are packed: integers in groups of 32 inputs, each with its own scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pallas_kernels.packed_matmul import PackedWeight, pack_int4, pack_int8

__all__ = ["Blocks", "merge"]

Array = NDArray[Any]


class Blocks(NamedTuple):
    """A weight [I, O] that is ``scale * q + offset``.

    Attributes:
        q: [I, O], uint8 for 4 bits (0..15, with an offset) or int8.
        scale: [I / 32, O] float16.
        offset: [I / 32, O] float16, or None for zeros.
    """

    q: Array
    scale: Array
    offset: Array | None

    def map(self, change: Callable[[Array], Array]) -> Blocks:
        """Change all arrays alike, for example the order of their outputs."""
        return Blocks(change(self.q), change(self.scale), None if self.offset is None else change(self.offset))

    def pack(self) -> PackedWeight:
        """In panels; the arrays are numpy's."""
        if self.q.dtype == np.uint8:
            assert self.offset is not None
            return pack_int4(self.q, self.scale, self.offset)
        return pack_int8(self.q, self.scale, self.offset)


def merge(parts: Sequence[Blocks]) -> Blocks:
    """Put weights side by side, [I, O1 + O2 + …]. Where they differ in kind, all become int8 with an offset."""
    if len({(part.q.dtype, part.offset is None) for part in parts}) > 1:
        parts = [
            Blocks(p.q.astype(np.int8), p.scale, np.zeros_like(p.scale) if p.offset is None else p.offset)
            for p in parts
        ]
    q, scale, *offset = (np.concatenate(arrays, axis=1) for arrays in zip(*parts, strict=True) if arrays[0] is not None)
    return Blocks(q, scale, offset[0] if offset else None)
