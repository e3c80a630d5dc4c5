"""CPU backend: one copy per token; XLA's scatter loops over elements in one thread."""

from __future__ import annotations

import jax

from pallas_kernels import native

__all__ = ["kv_write"]


def kv_write(
    pools: tuple[jax.Array, jax.Array], k: jax.Array, v: jax.Array, slots: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """See ``api.kv_write``."""
    native.load()
    shapes = tuple(jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools)
    k_cache, v_cache = jax.ffi.ffi_call("jaxserve_kv_write", shapes, input_output_aliases={0: 0, 1: 1})(
        *pools, k.astype(pools[0].dtype), v.astype(pools[1].dtype), slots
    )
    return k_cache, v_cache
