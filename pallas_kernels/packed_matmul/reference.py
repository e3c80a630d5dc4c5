"""jnp backend: runs everywhere, and unpacks the whole weight for every product."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.packed_matmul.format import GROUP, PackedWeight, unpack

__all__ = ["packed_matmul"]


def packed_matmul(x: jax.Array, weight: PackedWeight, activation_bits: int) -> jax.Array:
    """See ``api.packed_matmul``."""
    x = x.astype(jnp.float32)
    if weight.scale is not None and activation_bits == 8:
        x = _rounded(x)
    return jnp.dot(x, unpack(weight).astype(jnp.float32))


def _rounded(x: jax.Array) -> jax.Array:
    groups = x.reshape(x.shape[0], -1, GROUP)
    scale = jnp.max(jnp.abs(groups), axis=-1, keepdims=True) / 127
    return (jnp.round(groups / jnp.where(scale > 0, scale, 1)) * scale).reshape(x.shape)
