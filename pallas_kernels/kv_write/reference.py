"""jnp backend: XLA's scatter."""

from __future__ import annotations

import jax

__all__ = ["kv_write"]


def kv_write(
    pools: tuple[jax.Array, jax.Array], k: jax.Array, v: jax.Array, slots: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """See ``api.kv_write``."""
    return _scatter(pools[0], k, slots), _scatter(pools[1], v, slots)


def _scatter(cache: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
    num_blocks, block_size = cache.shape[:2]
    flat = cache.reshape(num_blocks * block_size, *cache.shape[2:])
    flat = flat.at[slots].set(new.astype(cache.dtype), mode="drop", unique_indices=True)
    return flat.reshape(cache.shape)
