"""Matrix products with weights: the one place that looks at the type of a weight leaf."""

from __future__ import annotations

import jax
import jax.numpy as jnp

__all__ = ["linear"]


def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """x [T, I] times weight [I, O] plus bias [O] -> [T, O], accumulated in float32, in x's dtype."""
    out = jnp.dot(x, weight, preferred_element_type=jnp.float32)
    if bias is not None:
        out = out + bias.astype(jnp.float32)
    return out.astype(x.dtype)
