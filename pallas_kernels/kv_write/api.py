"""In-place updates of a block pool. XLA's scatter does them without a copy when the pool is donated."""

from __future__ import annotations

import jax

__all__ = ["copy_blocks", "kv_write"]


def kv_write(cache: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
    """Write new [T, K, D] into cache [N, S, K, D] at slots [T] (block * S + offset).

    A slot of N * S or more is dropped: that is where padding tokens go. Real slots must differ from each other.
    """
    num_blocks, block_size = cache.shape[:2]
    flat = cache.reshape(num_blocks * block_size, *cache.shape[2:])
    flat = flat.at[slots].set(new.astype(cache.dtype), mode="drop", unique_indices=True)
    return flat.reshape(cache.shape)


def copy_blocks(cache: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
    """Copy blocks source [C] of cache [N, S, K, D] over blocks target [C]; all are read before any is written.

    Padding pairs copy the null block onto itself.
    """
    return cache.at[target].set(cache[source])
