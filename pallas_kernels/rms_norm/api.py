"""The one public function. On GPUs the reference stays: XLA fuses it with what stands around it."""

from __future__ import annotations

from collections.abc import Callable

import jax

from pallas_kernels.rms_norm import cpu, reference

__all__ = ["rms_norm"]

_BACKENDS: dict[str, Callable[[jax.Array, jax.Array, float], jax.Array]] = {
    "cpu": cpu.rms_norm,
    "triton": reference.rms_norm,
    "reference": reference.rms_norm,
    "mosaic": reference.rms_norm,
}


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, *, backend: str = "reference") -> jax.Array:
    """Normalise the last axis of x [..., E] and scale it by weight [E] (Zhang and Sennrich 2019, arXiv:1910.07467).

    Computed in float32, returned in x's dtype. ``backend`` is the one that attention uses
    (``paged_attention.select_backend``).
    """
    return _BACKENDS[backend](x, weight, eps)
