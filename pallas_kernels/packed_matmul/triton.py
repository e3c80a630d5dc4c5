"""NVIDIA GPU backend: a Pallas kernel that is lowered through Triton and dequantises in registers.

XLA writes a weight with scales per group out in floats before it multiplies; this reads its 4 or 8 bits, once per tile
of tokens. A program makes a tile of the product's transpose, columns x tokens: so the weight is the left factor, which
Hopper's matrix units take from registers, and steps of 16 tokens and prompts of 2048 are made by one instruction, 16 or
128 tokens wide.

A word holds 8 (or 2) inputs of a column. Instead of taking words apart and putting inputs in order, input j of all the
words of a step is one product, with the matching x: x is laid out so before, [T, j, word], by XLA.

A step of few tokens has too few tiles for a chip, so its inputs are split, **by the number of inputs alone**, and the
parts are added in order: a row's result does not depend on the rows beside it. That holds within each class of steps
("decode", "mixed", "prefill"), since they split differently.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import tuning
from pallas_kernels.launching import Launch, Ref, dot, load, refuse_gpu, steps_per_split, store, wide
from pallas_kernels.packed_matmul.format import GROUP, PANEL, PackedWeight

__all__ = ["Sizes", "default_sizes", "packed_matmul", "refuse"]

_FEWEST_TOKENS = 16  # of a tile
_CLASSES = {"decode": 64, "mixed": 256}  # most tokens of a step; with more it is a prefill

_ONE = 0x3F800000  # 1.0, as bits of a float32
_MANTISSA = 23  # bits


class Sizes(NamedTuple):
    """Sizes of a launch: its tile, how often inputs are split at most, and how Triton compiles it."""

    columns: int
    tokens: int
    """At most; steps of fewer have narrower tiles."""
    groups: int
    """Groups of inputs in a step of the loop."""
    splits: int
    num_warps: int
    num_stages: int


def refuse(kind: str, activation_bits: int) -> str | None:
    """Why it cannot serve weights of this kind (see ``api.select_backend``); None if it can."""
    return refuse_gpu() or _refuse_kind(kind, activation_bits)


def _refuse_kind(kind: str, activation_bits: int) -> str | None:
    if kind not in ("int4", "int8"):
        return f"it multiplies with quantised weights only, not {kind}; matrices of floats need no packing on a GPU"
    if activation_bits != 16:
        return "it multiplies activations as they are and does not round them to 8 bits"
    return None


def default_sizes(tokens: int, kind: str, dtype: str) -> Sizes:
    """Tuned sizes for the GPU in use of a product of this many tokens of ``dtype``.

    Shape classes are class of step / bytes of an element of x / kind of weight: "decode/b2/int4".
    """
    step = next((name for name, most in _CLASSES.items() if tokens <= most), "prefill")
    return Sizes(**tuning.sizes("packed_matmul", f"{step}/b{jnp.dtype(dtype).itemsize}/{kind}"))


def packed_matmul(
    x: jax.Array,
    weight: PackedWeight,
    activation_bits: int = 16,
    *,
    sizes: Sizes | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See ``api.packed_matmul``. Weights are rounded to x's dtype before they are multiplied; sums are float32.

    Args:
        x: as there.
        weight: as there, quantised.
        activation_bits: 16.
        sizes: by default the tuned ones.
        interpret: run on any device, slowly, by Pallas' interpreter.
    """
    name = weight.data.dtype.name
    code = _CODES.get(name)
    reason = _refuse_kind(name if code is None else code.kind, activation_bits)
    if code is None or reason is not None:
        raise ValueError(f"the Triton backend for packed weights cannot serve this: {reason}")
    (num_tokens, size_in), (_, size_out) = x.shape, weight.shape
    sizes = sizes or default_sizes(num_tokens, code.kind, x.dtype.name)
    tokens = min(sizes.tokens, max(_FEWEST_TOKENS, pl.next_power_of_2(num_tokens)))
    steps = pl.cdiv(size_in, sizes.groups * GROUP)
    per_split = steps_per_split(size_in, sizes.groups * GROUP, sizes.splits)
    tile = _Tile(sizes.columns, tokens, sizes.groups, per_split, code, num_tokens, size_out)
    grid = (
        pl.cdiv(num_tokens, tokens),
        pl.cdiv(weight.data.shape[0] * PANEL, sizes.columns),
        pl.cdiv(steps, per_split),
    )
    launch = Launch(partial(_kernel, tile), "packed_matmul", grid, sizes.num_warps, sizes.num_stages, interpret)
    data = weight.data if weight.data.dtype == jnp.uint32 else lax.bitcast_convert_type(weight.data, jnp.uint16)
    parts = launch(
        _arranged(x, code.inputs, grid[0] * tokens, steps * sizes.groups * GROUP),
        _Panels(data, weight.scale, weight.offset),
        out=jax.ShapeDtypeStruct((grid[2], num_tokens, size_out), jnp.float32),
    )
    return functools.reduce(operator.add, parts)


@dataclass(frozen=True)
class _Code:
    """How integers lie in words: input j of a word has its lowest bit at ``shifts[j]``."""

    kind: str
    bits: int
    shifts: tuple[int, ...]
    signed: bool

    @property
    def inputs(self) -> int:
        """Inputs of a word."""
        return len(self.shifts)


_CODES = {  # by dtype of the panels; a pair of int8 is read as one uint16
    "uint32": _Code("int4", 4, (0, 8, 16, 24, 4, 12, 20, 28), signed=False),
    "int8": _Code("int8", 8, (0, 8), signed=True),
}


class _Panels(NamedTuple):
    """See ``PackedWeight``; offset may be None."""

    data: Ref
    scale: Ref
    offset: Ref


@dataclass(frozen=True)
class _Tile:
    """What the kernel is compiled for. Letters: N columns, M tokens, G groups of a step, W words of a group."""

    columns: int
    tokens: int
    groups: int
    steps: int
    """Of a split."""
    code: _Code
    num_tokens: int
    """T."""
    size_out: int
    """O."""


def _arranged(x: jax.Array, inputs: int, tokens: int, size_in: int) -> jax.Array:
    """x [T, I] with zeros up to these sizes, as [T, input of a word, word]."""
    padded = jnp.pad(x, ((0, tokens - x.shape[0]), (0, size_in - x.shape[1])))
    return padded.reshape(tokens, -1, inputs).swapaxes(1, 2)


def _kernel(tile: _Tile, x: Ref, panels: _Panels, out: Ref) -> None:
    """Grid (tiles of tokens, tiles of columns, splits) -> out [splits, T, O]."""
    split = pl.program_id(2)
    token = pl.program_id(0) * tile.tokens + lax.iota(jnp.int32, tile.tokens)
    column = pl.program_id(1) * tile.columns + lax.iota(jnp.int32, tile.columns)
    words = tile.groups * GROUP // tile.code.inputs

    def body(step: jax.Array, acc: jax.Array) -> jax.Array:
        data, scale, offset = _load(tile, panels, column, step)
        word = wide((step * words + lax.iota(jnp.int32, words))[:, None], (words, tile.tokens))
        for j in range(tile.code.inputs):
            values = (_fractions(tile.code, data, j) * scale + offset).astype(x.dtype).reshape(tile.columns, words)
            factor = load(x, (wide(token[None, :], word.shape), j, word), None)
            acc += dot(values, factor)
        return acc

    last = jnp.minimum((split + 1) * tile.steps, x.shape[2] // words)
    acc = lax.fori_loop(split * tile.steps, last, body, jnp.zeros((tile.columns, tile.tokens), jnp.float32))
    shape = (tile.tokens, tile.columns)
    there = (token < tile.num_tokens)[:, None] & (column < tile.size_out)[None, :]
    index = (split, wide(token[:, None], shape), wide(column[None, :], shape))
    store(out, index, acc.T, wide(there, shape))


def _load(tile: _Tile, panels: _Panels, column: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Words [N, G, W] of a step, and what their fractions are multiplied with and added to, [N, G, 1] float32."""
    num_panels, num_groups, _ = panels.scale.shape
    panel, lane = lax.div(column, PANEL)[:, None], lax.rem(column, PANEL)[:, None]
    group = (step * tile.groups + lax.iota(jnp.int32, tile.groups))[None, :]
    shape = (tile.columns, tile.groups)
    mask = None
    if num_panels * PANEL % tile.columns or num_groups % tile.groups:
        mask = wide((panel < num_panels) & (group < num_groups), shape)
    at = (wide(panel, shape), wide(group, shape), wide(lane, shape))
    scale = load(panels.scale, at, mask).astype(jnp.float32)
    offset = 0.0 if panels.offset is None else load(panels.offset, at, mask).astype(jnp.float32)
    per_group = GROUP // tile.code.inputs
    word = group[:, :, None] * per_group + lax.iota(jnp.int32, per_group)[None, None, :]
    whole = (*shape, per_group)
    data = load(
        panels.data,
        (wide(panel[:, :, None], whole), wide(word, whole), wide(lane[:, :, None], whole)),
        None if mask is None else wide(mask[:, :, None], whole),
    ).astype(jnp.uint32)
    # A fraction is 1 + (q + zero) / range: see _fractions.
    span = 2.0**tile.code.bits
    zero = span / 2 if tile.code.signed else 0.0
    return data, (scale * span)[:, :, None], (offset - scale * (span + zero))[:, :, None]


def _fractions(code: _Code, words: jax.Array, j: int) -> jax.Array:
    """1 + q / 2 ** bits for input j of each word, as float32; signed q count from the least.

    A number between 1 and 2 has q for the first bits of its mantissa: two operations make it, where a conversion from
    integers takes several times as long. The products with scales are exact.
    """
    left = _MANTISSA - code.bits - code.shifts[j]
    moved = words << np.uint32(left) if left > 0 else words >> np.uint32(-left)
    mask = (1 << code.bits) - 1 << _MANTISSA - code.bits
    flipped = 1 << _MANTISSA - 1 if code.signed else 0  # of signed integers the top bit
    return lax.bitcast_convert_type((moved & np.uint32(mask)) ^ np.uint32(_ONE | flipped), jnp.float32)
