"""Random weights and adapters, made on the device, and chains of products with them.

Every product of a chain has a weight of its own, so that none finds its weight in the second-level cache; its result is
the next one's other factor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.lora_matmul import Backend as LoraBackend
from pallas_kernels.lora_matmul import LoraWeights, make_plan
from pallas_kernels.packed_matmul import GROUP, PANEL, PackedWeight

__all__ = ["Adapters", "chain", "lora_chain", "random_adapters", "random_vectors", "random_weight"]

Product = Callable[[jax.Array, PackedWeight | jax.Array], jax.Array]
"""(x [T, I], weight [I, O]) -> [T, O]."""

_SLOTS = 5  # 0 is none, nobody has 2


class Adapters(NamedTuple):
    """Those of one layer and of products of one part, and which of them each token has [T]; that of slot 2 is NaN."""

    weights: LoraWeights
    slots: jax.Array


def random_vectors(tokens: int, size: int, dtype: str) -> jax.Array:
    """[T, I], normal."""
    return jax.random.normal(jax.random.key(tokens), (tokens, size), dtype)


def random_weight(kind: str, size_in: int, size_out: int, seed: int = 0) -> PackedWeight:
    """A weight of kind int4 or int8 whose products are about as large as what it is multiplied with."""
    panels, keys = -(-size_out // PANEL), jax.random.split(jax.random.key(seed))
    # Any bits are integers; these are about as large as they get on average.
    deviation, offset = (4.6, -7.5) if kind == "int4" else (74, 0.5)
    if kind == "int4":
        data = jax.random.bits(keys[0], (panels, size_in // 8, PANEL), jnp.uint32)
    else:
        bits = jax.random.bits(keys[0], (panels, size_in // 2, PANEL, 2), jnp.uint8)
        data = jax.lax.bitcast_convert_type(bits, jnp.int8)
    groups = (panels, size_in // GROUP, PANEL)
    scale = size_in**-0.5 / deviation * jax.random.uniform(keys[1], groups, minval=0.5, maxval=1.5)
    return PackedWeight(data, scale.astype(jnp.float16), (scale * offset).astype(jnp.float16), size_out=size_out)


def random_adapters(tokens: int, size_in: int, rank: int, size_out: int, dtype: str) -> Adapters:
    """Adapters for a step; most tokens have the first, some have none."""
    keys, n = jax.random.split(jax.random.key(rank)), _SLOTS - 1
    a = jax.random.normal(keys[0], (n, 1, rank, size_in), dtype) * jnp.asarray(size_in**-0.5, dtype)
    b = jax.random.normal(keys[1], (n, 1, rank, size_out), dtype) * jnp.asarray(rank**-0.5, dtype)
    slots = np.random.default_rng(tokens).choice([0, 1, 3, 4], tokens, p=[0.3, 0.5, 0.15, 0.05])
    ranks = jnp.full((n, 1, 1), rank, jnp.int32)
    weights = LoraWeights(a.at[1].set(jnp.nan), b.at[1].set(jnp.nan), ranks, (size_out,))
    return Adapters(weights, jnp.asarray(slots, jnp.int32))


def chain(product: Product) -> Callable[[jax.Array, Sequence[PackedWeight | jax.Array]], jax.Array]:
    """A function to be jitted: x times all weights [I, I], one after the other."""

    def run(x: jax.Array, weights: Sequence[PackedWeight | jax.Array]) -> jax.Array:
        call = jax.jit(product)  # traced and lowered once
        for weight in weights:
            x = call(x, weight).astype(x.dtype)
        return x

    return run


def lora_chain(product: LoraBackend) -> Callable[[jax.Array, Sequence[Adapters]], jax.Array]:
    """A function to be jitted: what adapters [I, I] add to x, added, one product after the other; one plan for all."""

    def run(x: jax.Array, adapters: Sequence[Adapters]) -> jax.Array:
        plan, call = make_plan(adapters[0].slots, _SLOTS), jax.jit(product)
        for weights, _ in adapters:
            x = x + call(x, weights, jnp.int32(0), plan).astype(x.dtype)
        return x

    return run
