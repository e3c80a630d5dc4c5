"""jnp backend: runs everywhere, and unpacks the whole weight for every product."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.packed_matmul.format import PackedWeight, unpack

__all__ = ["packed_matmul"]


def packed_matmul(x: jax.Array, weight: PackedWeight) -> jax.Array:
    """See ``api.packed_matmul``."""
    return jnp.dot(x.astype(jnp.float32), unpack(weight).astype(jnp.float32))
