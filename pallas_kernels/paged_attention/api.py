"""The one public function, and the choice of who computes it."""

from __future__ import annotations

from collections.abc import Callable

import jax

from pallas_kernels.paged_attention import cpu, mosaic, reference, triton
from pallas_kernels.paged_attention.plan import AttentionPlan
from pallas_kernels.selection import choose_backend

__all__ = ["Backend", "paged_attention", "select_backend"]

Backend = Callable[..., jax.Array]
"""Same signature as ``paged_attention`` without ``backend``."""

_BACKENDS: dict[str, Backend] = {
    "triton": triton.paged_attention,
    "cpu": cpu.paged_attention,
    "reference": reference.paged_attention,
    "mosaic": mosaic.paged_attention,
}


def select_backend(
    name: str, *, head_dim: int, dtype: str, tree: bool = False, num_elements: int = 0
) -> tuple[str, str]:
    """Name of the backend that will serve ``name`` ("auto" or a backend's own), and why it was taken.

    Args:
        name: what was asked for.
        head_dim: D.
        dtype: name of the pools' dtype.
        tree: whether plans may hold trees.
        num_elements: of one pool (N * S * K * D); 0 where that is not known yet.

    Raises:
        ValueError: there is no such backend, or it refuses; the message says why.
    """
    refusals = {
        "triton": lambda: triton.refuse(head_dim, dtype, num_elements),
        "cpu": lambda: cpu.refuse(head_dim, dtype),
        # Not yet measured to be faster than Triton: "auto" comes here only where Triton refuses.
        "mosaic": lambda: mosaic.refuse(head_dim, dtype, tree=tree),
    }
    return choose_backend(name, _BACKENDS, refusals, what="attention backend", device=jax.default_backend())


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
    backend: str = "reference",
) -> jax.Array:
    """Attention of every row's query tokens over its cached tokens: causal, or as the plan's tree says.

    Args:
        q: [T, H, D] queries; tokens that no row owns give zeros.
        k_cache, v_cache: [N, S, K, D] pools of blocks, this step's keys and values already written; H is a multiple
            of K, and head h reads KV head h // (H / K).
        plan: the step's work lists.
        scale: factor of the scores, usually D ** -0.5.
        window: a query at position p sees positions p - window + 1 .. p; None for all up to p. In a tree, p counts a
            query's ancestors and not all that lies before it; what it sees of the tree itself is up to that alone, so
            a window must not be narrower than a tree is deep.
        soft_cap: scores become soft_cap * tanh(score / soft_cap); None for none.
        k_scale, v_scale: [N, S, K] float32 or float16, both or neither: the pools hold int8 or fp8 numbers, and a key
            or value is its numbers times the scale of its slot and head.
        backend: who computes it (see ``select_backend``).

    Returns:
        [T, H, D] in q's dtype. A row's result depends on that row alone, not on the batch around it.

    Raises:
        ValueError: only one of k_scale and v_scale is given, or the backend cannot serve these arguments.
    """
    if (k_scale is None) != (v_scale is None):
        raise ValueError("k_scale and v_scale belong together: give both or neither")
    options = {"scale": scale, "window": window, "soft_cap": soft_cap, "k_scale": k_scale, "v_scale": v_scale}
    return _BACKENDS[backend](q, k_cache, v_cache, plan, **options)
