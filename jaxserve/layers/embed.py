"""Token ids to vectors, and vectors to logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp

__all__ = ["embed", "unembed"]


def embed(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Rows tokens [T] of table [V, E] -> [T, E]."""
    return table[tokens]


def unembed(x: jax.Array, table: jax.Array) -> jax.Array:
    """Logits of x [T, E] with an output table [V, E] -> [T, V] float32."""
    return jax.lax.dot_general(x, table, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
