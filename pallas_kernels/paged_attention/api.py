"""The one public function, and the choice of who computes it."""

from __future__ import annotations

from collections.abc import Callable

import jax

from pallas_kernels.paged_attention import cpu, reference
from pallas_kernels.paged_attention.plan import AttentionPlan
from pallas_kernels.selection import choose_backend

__all__ = ["Backend", "paged_attention", "select_backend"]

Backend = Callable[..., jax.Array]
"""Same signature as ``paged_attention`` without ``backend``."""

_BACKENDS: dict[str, Backend] = {"cpu": cpu.paged_attention, "reference": reference.paged_attention}


def select_backend(name: str, *, head_dim: int, dtype: str) -> tuple[str, str]:
    """Name of the backend that will serve ``name`` ("auto" or a backend's own), and why it was taken.

    Args:
        name: what was asked for.
        head_dim: D.
        dtype: name of the pools' dtype.

    Raises:
        ValueError: there is no such backend, or it refuses; the message says why.
    """
    refusals = {"cpu": lambda: cpu.refuse(head_dim, dtype)}
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
    backend: str = "reference",
) -> jax.Array:
    """Causal attention of every row's query tokens over its cached tokens.

    Args:
        q: [T, H, D] queries; tokens that no row owns give zeros.
        k_cache, v_cache: [N, S, K, D] pools of blocks, this step's keys and values already written; H is a multiple
            of K, and head h reads KV head h // (H / K).
        plan: the step's work lists.
        scale: factor of the scores, usually D ** -0.5.
        window: a query at position p sees positions p - window + 1 .. p; None for all up to p.
        soft_cap: scores become soft_cap * tanh(score / soft_cap); None for none.
        backend: who computes it (see ``select_backend``).

    Returns:
        [T, H, D] in q's dtype. A row's result depends on that row alone, not on the batch around it.
    """
    return _BACKENDS[backend](q, k_cache, v_cache, plan, scale=scale, window=window, soft_cap=soft_cap)
