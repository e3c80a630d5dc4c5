"""Self-attention over the paged cache: write this step's keys and values, then attend."""

from __future__ import annotations

import jax

from jaxserve.layers.kv_cache import KVLayer
from pallas_kernels.paged_attention import AttentionPlan, paged_attention

__all__ = ["attention"]


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cache: KVLayer,
    slots: jax.Array,
    plan: AttentionPlan,
    *,
    window: int | None,
    soft_cap: float | None,
    backend: str,
) -> tuple[jax.Array, KVLayer]:
    """Attend q [T, H, D] over the cache, into which k, v [T, K, D] are first written at slots [T].

    Everything of the step is written before anything is read, so that a row may use blocks which another row of the
    same step fills. Returns [T, H, D] and the updated cache.
    """
    cache = cache.write(k, v, slots, backend=backend)
    out = paged_attention(
        q, cache.k, cache.v, plan, scale=q.shape[-1] ** -0.5, window=window, soft_cap=soft_cap, backend=backend
    )
    return out, cache
