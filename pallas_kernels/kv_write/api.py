"""In-place updates of the block pools. XLA's scatter does them without a copy when the pools are donated."""

from __future__ import annotations

from collections.abc import Callable

import jax

from pallas_kernels.kv_write import cpu, reference

__all__ = ["Pools", "copy_blocks", "kv_write"]

Pools = tuple[jax.Array, jax.Array]
"""Keys and values, each [N, S, K, D]."""

# By attention's backend, so that one choice serves both. On GPUs nothing beats the scatter: it is one launch, in place.
_BACKENDS: dict[str, Callable[[Pools, jax.Array, jax.Array, jax.Array], Pools]] = {
    "triton": reference.kv_write,
    "cpu": cpu.kv_write,
    "reference": reference.kv_write,
    "mosaic": reference.kv_write,
}


def kv_write(pools: Pools, k: jax.Array, v: jax.Array, slots: jax.Array, *, backend: str = "reference") -> Pools:
    """Write new k, v [T, K, D] into the pools at slots [T] (block * S + offset).

    A slot of N * S or more is dropped: that is where padding tokens go. Real slots must differ from each other.
    ``backend`` is the one that attention uses (``paged_attention.select_backend``).
    """
    return _BACKENDS[backend](pools, k, v, slots)


def copy_blocks(cache: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
    """Copy blocks source [C] of cache [N, S, K, D] over blocks target [C]; all are read before any is written.

    Padding pairs copy the null block onto itself.
    """
    return cache.at[target].set(cache[source])
