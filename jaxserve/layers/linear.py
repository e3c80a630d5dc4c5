"""Matrix products with weights: the one place, beside ``embed``, that looks at the type of a weight leaf."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxserve.lora.bank import Adapted
from jaxserve.quantization import Leaf, PackedLeaf

__all__ = ["linear"]


def linear(x: jax.Array, weight: Leaf | Adapted, bias: jax.Array | None = None) -> jax.Array:
    """x [T, I] times weight [I, O] plus bias [O] -> [T, O], accumulated in float32, in x's dtype."""
    out = _product(x, weight)
    if bias is not None:
        out = out + bias.astype(jnp.float32)
    return out.astype(x.dtype)


def _product(x: jax.Array, weight: Leaf | Adapted) -> jax.Array:
    if isinstance(weight, Adapted):
        return _product(x, weight.base) + weight.added(x)
    if isinstance(weight, PackedLeaf):
        return weight.matmul(x)
    return jnp.dot(x, weight, preferred_element_type=jnp.float32)
