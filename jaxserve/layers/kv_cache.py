"""The block pools of all layers, as one donated pytree.

One K and one V array per layer: the decoder is unrolled over them, so that each is updated in place (a stacked array
would be copied by a scan over layers). Block 0 is the null block: nobody owns it, padding may point at it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from pallas_kernels.kv_write import copy_blocks, kv_write

__all__ = ["KVCache", "KVLayer"]


@struct.dataclass
class KVLayer:
    """One layer's keys and values, each [N, S, K, D] (blocks, slots of a block, KV heads, head dim)."""

    k: jax.Array
    v: jax.Array

    def write(self, k: jax.Array, v: jax.Array, slots: jax.Array, *, backend: str) -> KVLayer:
        """Write k, v [T, K, D] at slots [T] (block * S + offset; out of range is dropped)."""
        return KVLayer(*kv_write((self.k, self.v), k, v, slots, backend=backend))

    def move(self, source: jax.Array, target: jax.Array, *, backend: str) -> KVLayer:
        """Copy slots source [T] over slots target [T], as in ``write``; all are read before any is written."""
        k, v = _read((self.k, self.v), source)
        return self.write(k, v, target, backend=backend)


@struct.dataclass
class KVCache:
    """Keys and values of all layers; block ids mean the same block in each.

    Attributes:
        layers: the pools of each.
        states: [N, S, Z], hidden states at each slot, where somebody reads them later; None elsewhere.
    """

    layers: tuple[KVLayer, ...]
    states: jax.Array | None = None

    @classmethod
    def zeros(
        cls, num_layers: int, shape: tuple[int, int, int, int], dtype: jnp.dtype, *, state_size: int = 0
    ) -> KVCache:
        """An empty cache; shape is [N, S, K, D], and ``state_size`` Z, 0 for no states."""
        layers = tuple(KVLayer(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(num_layers))
        return cls(layers, jnp.zeros((*shape[:2], state_size), dtype) if state_size else None)

    @property
    def num_slots(self) -> int:
        """N * S."""
        return self.layers[0].k.shape[0] * self.layers[0].k.shape[1]

    @property
    def block_size(self) -> int:
        return self.layers[0].k.shape[1]

    def move(self, source: jax.Array, target: jax.Array, *, backend: str) -> KVCache:
        """Copy slots source [T] over slots target [T] (out of range is dropped) in all layers, and the states."""
        layers = tuple(layer.move(source, target, backend=backend) for layer in self.layers)
        if self.states is None:
            return KVCache(layers)
        (states,) = _read((self.states,), source)
        return KVCache(layers, self.states).keep(states, target)

    def keep(self, states: jax.Array, slots: jax.Array) -> KVCache:
        """Write states [T, Z] at slots [T], distinct and out of range where they are to be dropped."""
        assert self.states is not None
        flat = self.states.reshape(-1, self.states.shape[-1])
        flat = flat.at[slots].set(states.astype(flat.dtype), mode="drop", unique_indices=True)
        return KVCache(self.layers, flat.reshape(self.states.shape))

    def copy(self, source: jax.Array, target: jax.Array) -> KVCache:
        """Copy blocks source [C] over blocks target [C] in all layers."""
        return jax.tree.map(lambda pool: copy_blocks(pool, source, target), self)


def _read(pools: tuple[jax.Array, ...], slots: jax.Array) -> tuple[jax.Array, ...]:
    """Entries [T, …] of slots [T] of each pool [N, S, …], which may be overwritten afterwards.

    On GPUs XLA would read in the kernel that writes, and copy the whole pool for that.
    """
    return jax.lax.optimization_barrier(tuple(pool.reshape(-1, *pool.shape[2:])[slots] for pool in pools))
