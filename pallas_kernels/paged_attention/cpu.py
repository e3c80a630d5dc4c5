"""CPU backend: a C++ kernel that reads keys and values in place (``native/src/attention.h``).

It needs no work lists: tokens, not padding, decide what it does.
"""

from __future__ import annotations

import jax
import numpy as np

from pallas_kernels import native
from pallas_kernels.paged_attention.plan import AttentionPlan

__all__ = ["paged_attention", "refuse"]

_FLOATS = ("float32", "bfloat16", "float16")
_DIM_STEP, _MAX_DIM = 16, 256


def refuse(head_dim: int, dtype: str) -> str | None:
    """Why it cannot serve heads of this size and pools of this dtype; None if it can."""
    if jax.default_backend() != "cpu":
        return "it runs on the CPU only"
    if head_dim % _DIM_STEP or head_dim > _MAX_DIM:
        return f"it serves head dims that are multiples of {_DIM_STEP} up to {_MAX_DIM}, not {head_dim}"
    if dtype not in _FLOATS:
        return f"it serves KV of {', '.join(_FLOATS)}, not {dtype}"
    return native.missing()


def paged_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    plan: AttentionPlan,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
) -> jax.Array:
    """See ``api.paged_attention``."""
    if k_scale is not None or v_scale is not None:
        raise ValueError("native attention has no quantised pools")
    trees = () if plan.tree is None else (plan.tree, plan.num_decode)
    native.load()
    return jax.ffi.ffi_call("jaxserve_paged_attention", jax.ShapeDtypeStruct(q.shape, q.dtype))(
        q,
        k_cache,
        v_cache,
        plan.query_start,
        plan.kv_lens,
        plan.block_tables,
        *trees,
        scale=np.float32(scale),
        window=np.int64(window or 0),
        soft_cap=np.float32(soft_cap or 0.0),
    )
