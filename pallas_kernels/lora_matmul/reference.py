"""jnp backend: gathers adapters for few tokens, which XLA fuses on GPUs, and goes through the slots for many.

A gathered adapter is as large as a token's share of it is small: 512 tokens would copy 512 adapters.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.lora_matmul.plan import LoraPlan

__all__ = ["MOST_GATHERED", "lora_matmul"]

MOST_GATHERED = 64
"""Tokens for which adapters are gathered."""


def lora_matmul(x: jax.Array, a: jax.Array, b: jax.Array, plan: LoraPlan) -> jax.Array:
    """See ``api.lora_matmul``."""
    return (_gathered if x.shape[0] <= MOST_GATHERED else _by_slot)(x, a, b, plan.slots)


def _einsum(spec: str, *factors: jax.Array) -> jax.Array:
    return jnp.einsum(spec, *factors, preferred_element_type=jnp.float32)


def _gathered(x: jax.Array, a: jax.Array, b: jax.Array, slots: jax.Array) -> jax.Array:
    h = _einsum("ti,tir->tr", x, a[slots].astype(x.dtype)).astype(x.dtype)
    return jnp.where(slots[:, None] > 0, _einsum("tr,tro->to", h, b[slots].astype(x.dtype)), 0.0)


def _by_slot(x: jax.Array, a: jax.Array, b: jax.Array, slots: jax.Array) -> jax.Array:
    def add(slot: jax.Array, out: jax.Array) -> jax.Array:
        has = slots == slot

        def product(out: jax.Array) -> jax.Array:
            h = _einsum("ti,ir->tr", x, a[slot].astype(x.dtype)).astype(x.dtype)
            return jnp.where(has[:, None], _einsum("tr,ro->to", h, b[slot].astype(x.dtype)), out)

        return lax.cond(has.any(), product, lambda out: out, out)

    return lax.fori_loop(1, a.shape[0], add, jnp.zeros((x.shape[0], b.shape[2]), jnp.float32))
