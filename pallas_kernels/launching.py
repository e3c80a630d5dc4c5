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
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import tuning

__all__ = ["Launch", "Ref", "load", "refuse_gpu", "wide"]

Ref = Any
"""An array in the device's memory, as kernels see it; jax has no public name for the type."""


def refuse_gpu() -> str | None:
    """Why no such kernel can run on the device in use; None if they can."""
    gpu = tuning.target()
    if gpu is None:
        return "it runs on NVIDIA GPUs only"
    if gpu.capability < 80:
        return f"it needs compute capability 8.0, and {gpu.kind} has {gpu.capability / 10}"
    return None


@dataclass(frozen=True)
class Launch:
    """A kernel and how it is launched.

    Attributes:
        kernel: takes the refs of all arrays, those of the inputs in their trees first.
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

    def __call__(self, *args: Any, out: jax.ShapeDtypeStruct) -> jax.Array:
        """Run it on trees of arrays; the result has ``out``'s shape and whatever the kernel stores."""
        anywhere = pl.BlockSpec(memory_space=pl.ANY)
        return pl.pallas_call(
            self.kernel,
            grid=self.grid,
            in_specs=jax.tree.map(lambda _: anywhere, args),
            out_specs=anywhere,
            out_shape=out,
            compiler_params=plgpu.CompilerParams(num_warps=self.num_warps, num_stages=self.num_stages),
            interpret=self.interpret,
            name=self.name,
        )(*args)


def load(ref: Ref, index: Any, mask: jax.Array | None) -> jax.Array:
    """ref[index], of mask's shape; zeros where mask is off, which reads nothing. Without a mask all is there."""
    return plgpu.load(ref.at[index], mask=mask, other=None if mask is None else jnp.zeros(mask.shape, ref.dtype))


def wide(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Broadcast, as every index array of an access must be."""
    return jnp.broadcast_to(x, shape)
