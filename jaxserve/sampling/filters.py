"""top-k, top-p and min-p by searching for a threshold, without a sort.

The k-th largest value of a row, and the smallest probability inside its nucleus, are found bit by bit: a float's bits,
read as an integer, order like the float itself, so 32 counting passes give the exact value. A sort of a 50,000-token
vocabulary costs several times as much on CPUs, and many kernels on GPUs. Tokens that tie with the threshold stay in.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxserve.sampling.arrays import SamplingInput

__all__ = ["keep_likely"]


def keep_likely(logits: jax.Array, params: SamplingInput) -> jax.Array:
    """Set to -inf the logits [P, V] (already divided by the temperature) that top-k, top-p or min-p drop.

    In vLLM's order: min-p against the likeliest token, top-k, then top-p over what is left.
    """
    best = logits.max(-1, keepdims=True)
    logits = jnp.where(logits < best + jnp.log(params.min_p)[:, None], -jnp.inf, logits)
    keys = _ordered(logits)
    logits = jnp.where(keys < _kth_largest(keys, params.top_k), -jnp.inf, logits)
    probs = jax.nn.softmax(logits, axis=-1)
    nucleus = _nucleus_edge(probs, params.top_p)
    return jnp.where(_ordered(probs) < nucleus, -jnp.inf, logits)


def _ordered(x: jax.Array) -> jax.Array:
    """float32 -> uint32 that orders the same way."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _kth_largest(keys: jax.Array, k: jax.Array) -> jax.Array:
    """Largest threshold [P, 1] that at least k [P] keys [P, V] reach (0, which all reach, where there are fewer)."""
    return _search(keys.shape[0], lambda edge: (keys >= edge).sum(-1) >= k)


def _nucleus_edge(probs: jax.Array, top_p: jax.Array) -> jax.Array:
    """Largest threshold [P, 1] above which probs [P, V] still add up to top_p [P]; 0 where top_p is off."""
    keys = _ordered(probs)
    edge = _search(probs.shape[0], lambda edge: jnp.where(keys >= edge, probs, 0.0).sum(-1) >= top_p)
    return jnp.where(top_p[:, None] >= 1.0, jnp.uint32(0), edge)


def _search(rows: int, holds: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Largest uint32 [P, 1] for which ``holds`` [P], a predicate that only turns from true to false, is true."""

    def body(i: jax.Array, edge: jax.Array) -> jax.Array:
        candidate = edge | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(holds(candidate)[:, None], candidate, edge)

    return jax.lax.fori_loop(0, 32, body, jnp.zeros((rows, 1), jnp.uint32))
