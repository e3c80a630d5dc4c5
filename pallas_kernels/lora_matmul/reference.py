"""jnp backend: gathers adapters for few tokens, which XLA fuses on GPUs, and goes through the slots for many.

A gathered adapter is as large as a token's share of it is small: 512 tokens would copy 512 adapters.
"""

from __future__ import annotations

from itertools import accumulate

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.lora_matmul.plan import LoraPlan
from pallas_kernels.lora_matmul.weights import LoraWeights

__all__ = ["MOST_GATHERED", "lora_matmul"]

MOST_GATHERED = 64
"""Tokens for which adapters are gathered."""


def lora_matmul(x: jax.Array, weights: LoraWeights, layer: jax.Array, plan: LoraPlan) -> jax.Array:
    """See ``api.lora_matmul``."""
    return (_gathered if x.shape[0] <= MOST_GATHERED else _by_slot)(x, weights, layer, plan.slots)


def _einsum(spec: str, *factors: jax.Array) -> jax.Array:
    return jnp.einsum(spec, *factors, preferred_element_type=jnp.float32)


def _expand(spec: str, h: jax.Array, b: jax.Array, parts: tuple[int, ...]) -> jax.Array:
    """Each part's ranks of h [T, P * R] times its columns of b [..., R, O] -> [T, O]."""
    ends = list(accumulate(parts))
    columns = (b[..., end - size : end] for end, size in zip(ends, parts, strict=True))
    return jnp.concatenate(
        [_einsum(spec, own, b) for own, b in zip(jnp.split(h, len(parts), axis=1), columns, strict=True)], axis=1
    )


def _gathered(x: jax.Array, weights: LoraWeights, layer: jax.Array, slots: jax.Array) -> jax.Array:
    at = jnp.maximum(slots - 1, 0)
    h = _einsum("ti,tri->tr", x, weights.a[at, layer].astype(x.dtype)).astype(x.dtype)
    out = _expand("tr,tro->to", h, weights.b[at, layer].astype(x.dtype), weights.parts)
    return jnp.where(slots[:, None] > 0, out, 0.0)


def _by_slot(x: jax.Array, weights: LoraWeights, layer: jax.Array, slots: jax.Array) -> jax.Array:
    def add(index: jax.Array, out: jax.Array) -> jax.Array:
        has = slots == index + 1

        def product(out: jax.Array) -> jax.Array:
            h = _einsum("ti,ri->tr", x, weights.a[index, layer].astype(x.dtype)).astype(x.dtype)
            own = _expand("tr,ro->to", h, weights.b[index, layer].astype(x.dtype), weights.parts)
            return jnp.where(has[:, None], own, out)

        return lax.cond(has.any(), product, lambda out: out, out)

    return lax.fori_loop(0, weights.a.shape[0], add, jnp.zeros((x.shape[0], weights.b.shape[3]), jnp.float32))
