"""Lowering for an NVIDIA GPU on machines without one."""

from __future__ import annotations

import contextlib

import jax

__all__ = ["TRITON_CALL", "pretended_gpu"]

TRITON_CALL = "custom_call @__gpu$xla.gpu.triton"
"""What a kernel is in a lowered program's text."""


def pretended_gpu() -> contextlib.AbstractContextManager[object]:
    """A context in which jax takes an H200 to be there."""
    if jax.__version_info__ < (0, 11):  # takes compute capability 9.0 for granted
        return contextlib.nullcontext()
    device = jax.sharding.AbstractDevice("NVIDIA H200", platform="gpu", num_cores=132)
    mesh = jax.sharding.AbstractMesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)
