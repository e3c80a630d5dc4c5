"""How packed weights lie in memory: panels of 16 output columns, so that a product reads them once, in order.

A panel holds 16 columns of a weight [I, O], input by input: one row of a panel is one cache line of float32, or one to
four vector registers, whatever the CPU. Quantised panels keep groups of 32 inputs with one scale (and offset) per
column and group, the blocks of GGUF's Q4_0, Q4_1 and Q8_0: a weight is ``scale * q + offset``. Inputs of a
column lie together, two of 8 bits or eight of 4: instructions that multiply integers add the products of neighbours.
Formats with larger groups (GPTQ and AWQ: 4 bits, 128 inputs, ``scale * (q - zero)``) are this one with scales repeated
and an offset of -scale * zero.

Letters: I inputs, O outputs, P panels, G groups of inputs.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from numpy.typing import NDArray

__all__ = ["GROUP", "PANEL", "PackedWeight", "pack", "pack_int4", "pack_int8", "take_columns", "unpack"]

PANEL = 16
"""Output columns of a panel."""

GROUP = 32
"""Inputs that share a scale."""

_INPUTS = {"int8": 2, "uint32": 8}  # inputs per row of a panel; of floats, one
_SHIFTS = np.array([0, 8, 16, 24, 4, 12, 20, 28], np.uint32)  # of the eight inputs of a word

Array = NDArray[Any]


@struct.dataclass
class PackedWeight:
    """A weight [I, O] in panels; columns past O are zeros.

    Attributes:
        data: [P, I, 16] float32, bfloat16 or float16; [P, I / 2, 16, 2] int8; [P, I / 8, 16] uint32 for 4 bits (0..15),
            where input i of eight is the low half of byte i, or the high half of byte i - 4.
        scale: [P, G, 16] float16 of int8 and 4 bits, else None.
        offset: [P, G, 16] float16 of 4 bits, and of int8 where it has one, else None.
        size_out: O.
    """

    data: jax.Array | Array
    scale: jax.Array | Array | None
    offset: jax.Array | Array | None
    size_out: int = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, int]:
        """(I, O)."""
        return self.data.shape[1] * _INPUTS.get(self.data.dtype.name, 1), self.size_out


def pack(weight: Array) -> PackedWeight:
    """Pack a float weight [I, O] of numpy, keeping its dtype; the arrays of the result are numpy's too."""
    return PackedWeight(_panels(weight), None, None, size_out=weight.shape[1])


def pack_int8(q: Array, scale: Array, offset: Array | None = None) -> PackedWeight:
    """Pack q [I, O] int8 with scale and offset [I / 32, O]; see ``pack``."""
    scales = _scales(q, scale, offset)
    panels = _panels(q.astype(np.int8))
    pairs = panels.reshape(panels.shape[0], -1, 2, PANEL).swapaxes(2, 3)
    return PackedWeight(np.ascontiguousarray(pairs), *scales, size_out=q.shape[1])


def pack_int4(q: Array, scale: Array, offset: Array, *, group: int = GROUP) -> PackedWeight:
    """Pack q [I, O] in 0..15 with scale and offset [I / group, O]; see ``pack``.

    Args:
        q: the integers.
        scale: their scales.
        offset: what is added; of a weight ``scale * (q - zero)`` that is -scale * zero, rounded to float16.
        group: inputs that share a scale, a multiple of 32.
    """
    if group % GROUP:
        raise ValueError(f"inputs that share a scale are a multiple of {GROUP}, not {group}")
    scales = _scales(q, *(np.repeat(array, group // GROUP, axis=0) for array in (scale, offset)))
    panels = _panels(q.astype(np.uint8))
    eights = panels.reshape(panels.shape[0], -1, len(_SHIFTS), PANEL).astype(np.uint32)
    words = np.bitwise_or.reduce(eights << _SHIFTS[:, None], axis=2)
    return PackedWeight(words, *scales, size_out=q.shape[1])


def unpack(weight: PackedWeight) -> jax.Array:
    """The weight [I, O] that ``weight`` stands for: float32, or the dtype that it is stored in."""
    return _columns(_values(*jax.tree.map(jnp.asarray, (weight.data, weight.scale, weight.offset))), weight.size_out)


def take_columns(weight: PackedWeight, columns: jax.Array) -> jax.Array:
    """Columns [T] of the weight -> [T, I], as ``unpack`` gives them, reading those columns only."""
    panel, lane = columns // PANEL, columns % PANEL

    def take(array: jax.Array | Array) -> jax.Array:
        return jnp.asarray(array)[panel, :, lane][:, :, None]  # [T, I, I / 2, I / 8 or G, 1, ...]

    return _values(*jax.tree.map(take, (weight.data, weight.scale, weight.offset)))[:, :, 0]


def _panels(matrix: Array) -> Array:
    """[I, O] -> [P, I, 16]."""
    size_in, size_out = matrix.shape
    padded = np.pad(matrix, ((0, 0), (0, -size_out % PANEL)))
    return np.ascontiguousarray(padded.reshape(size_in, -1, PANEL).swapaxes(0, 1))


def _columns(panels: jax.Array, size_out: int) -> jax.Array:
    """[P, I, 16] -> [I, O]."""
    return panels.swapaxes(0, 1).reshape(panels.shape[1], -1)[:, :size_out]


def _scales(q: Array, scale: Array, offset: Array | None) -> tuple[Array, Array | None]:
    groups = (q.shape[0] // GROUP, q.shape[1])
    wrong = [array.shape for array in (scale, offset) if array is not None and array.shape != groups]
    if q.shape[0] % GROUP or wrong:
        raise ValueError(f"scales of a weight {q.shape} have shape [I / {GROUP}, O], not {(wrong or [scale.shape])[0]}")
    return _panels(scale.astype(np.float16)), None if offset is None else _panels(offset.astype(np.float16))


def _values(data: jax.Array, scale: jax.Array | None, offset: jax.Array | None) -> jax.Array:
    """Panels of n columns and their scales -> values [P, I, n]."""
    if scale is None:
        return data
    # [P, I / 2, 2, n] or [P, I / 8, 8, n]
    inputs = data.swapaxes(2, 3) if data.dtype == jnp.int8 else data[:, :, None] >> _SHIFTS[:, None] & 15
    data = inputs.reshape(data.shape[0], -1, data.shape[2])
    values = data.astype(jnp.float32) * jnp.repeat(scale.astype(jnp.float32), GROUP, axis=1)
    return values if offset is None else values + jnp.repeat(offset.astype(jnp.float32), GROUP, axis=1)
