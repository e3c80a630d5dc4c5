"""Token ids to vectors, and vectors to logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxserve.lora.bank import Adapted
from jaxserve.quantization import Leaf, PackedLeaf

__all__ = ["embed", "unembed"]


def embed(table: Leaf | Adapted, tokens: jax.Array) -> jax.Array:
    """Vectors of tokens [T] in a table of V vectors -> [T, E], in the table's ``dtype``."""
    if isinstance(table, Adapted):
        x = embed(table.base, tokens)
        return (x.astype(jnp.float32) + table.added_to_rows(tokens, x.dtype)).astype(x.dtype)
    return table.take(tokens) if isinstance(table, PackedLeaf) else table[tokens]


def unembed(x: jax.Array, table: Leaf | Adapted) -> jax.Array:
    """Logits of x [T, E] with a table of V vectors -> [T, V] float32."""
    if isinstance(table, Adapted):
        return unembed(x, table.base) + table.added(x)
    if isinstance(table, PackedLeaf):
        return table.matmul(x)
    return jax.lax.dot_general(x, table, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
