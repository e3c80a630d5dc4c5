"""What kernels that are lowered through Triton share: which GPUs they need, how they are launched, how they load.

Kernels address whole arrays themselves, so what is no rectangle of an array (panels, gathered rows) is loaded like
anything else. The interpreter asks for a few things: a masked access spells all its axes as index arrays, and lanes
that must not be stored point out of bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import triton_lowering, tuning
from pallas_kernels.triton_lowering import triton

__all__ = ["Launch", "Ref", "dot", "load", "refuse_gpu", "steps_per_split", "store", "wide"]

_SHORTEST_SPLIT = 1024  # inputs

Ref = Any
"""An array in the device's memory, as kernels see it; jax has no public name for the type."""


def refuse_gpu() -> str | None:
    """Why no such kernel can run on the device in use; None if they can."""
    gpu = tuning.target()
    if gpu is None:
        return "it runs on NVIDIA GPUs only"
    if gpu.capability < 80:
        return f"it needs compute capability 8.0, and {gpu.kind} has {gpu.capability / 10}"
    return triton_lowering.missing()


@dataclass(frozen=True)
class Launch:
    """A kernel and how it is launched.

    Attributes:
        kernel: takes the refs of all arrays in their trees, those of the inputs first, then those of the result.
        name: in profiles.
        grid: number of programs along each axis, the quickest first.
        num_warps: per program.
        num_stages: of Triton's software pipeline.
        interpret: run on any device, slowly, by Pallas' interpreter.
    """

    kernel: Callable[..., None]
    name: str
    grid: tuple[int, ...]
    num_warps: int
    num_stages: int
    interpret: bool

    def __call__(self, *args: Any, out: Any) -> Any:
        """Run it on trees of arrays; the result is whatever the kernel stores.

        Args:
            args: the inputs.
            out: the result's shape, or a tuple of shapes; or one array to write into.
        """
        aliased = isinstance(out, jax.Array)
        inputs = (*args, out) if aliased else args
        anywhere = pl.BlockSpec(memory_space=pl.ANY)

        def kernel(*refs: Any) -> None:
            self.kernel(*refs[: len(args)], *refs[len(inputs) :])

        return pl.pallas_call(
            kernel,
            grid=self.grid,
            in_specs=jax.tree.map(lambda _: anywhere, inputs),
            out_specs=jax.tree.map(lambda _: anywhere, out),
            out_shape=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), out),
            input_output_aliases={len(jax.tree.leaves(args)): 0} if aliased else {},
            compiler_params=triton().CompilerParams(num_warps=self.num_warps, num_stages=self.num_stages),
            interpret=self.interpret,
            name=self.name,
        )(*inputs)


def steps_per_split(num_inputs: int, inputs_per_step: int, most_splits: int) -> int:
    """Steps that each part of a sum over inputs has: by their number alone, so that no row's sum depends on others."""
    steps = pl.cdiv(num_inputs, inputs_per_step)
    return max(pl.cdiv(steps, most_splits), min(steps, pl.cdiv(_SHORTEST_SPLIT, inputs_per_step)))


def load(ref: Ref, index: Any, mask: jax.Array | None) -> jax.Array:
    """ref[index], of mask's shape; zeros where mask is off, which reads nothing. Without a mask all is there."""
    return triton().load(ref.at[index], mask=mask, other=None if mask is None else jnp.zeros(mask.shape, ref.dtype))


def store(ref: Ref, index: Any, value: jax.Array, mask: jax.Array) -> None:
    """ref[index] = value where mask, of their shape, is on."""
    triton().store(ref.at[index], value, mask=mask)


def dot(left: jax.Array, right: jax.Array, *, axis: int = 0) -> jax.Array:
    """left [M, K] @ right [K, N], or [N, K] with axis 1, on the matrix units -> [M, N] float32."""
    # By default float32 is cut to TF32.
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    dimensions = (((1,), (axis,)), ((), ()))
    return lax.dot_general(left, right, dimensions, precision=precision, preferred_element_type=jnp.float32)


def wide(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Broadcast, as every index array of an access must be."""
    return jnp.broadcast_to(x, shape)
