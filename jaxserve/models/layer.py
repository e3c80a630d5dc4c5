"""One layer of the decoder, whatever its tokens attend to: attention, then the gated feed-forward block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxserve.layers import apply_rope, gated_mlp, linear
from jaxserve.models.config import ModelConfig

__all__ = ["Attend", "Norm", "Rotation", "run_layer"]

Kept = TypeVar("Kept")
Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Kept]]
"""Attention of q [T, H, D] with k, v [T, K, D], rotated: [T, H, D], and what becomes of the keys and values."""

Norm = Callable[[jax.Array, jax.Array], jax.Array]
"""RMSNorm of x [T, E] with weight [E]."""

Rotation = tuple[jax.Array, jax.Array]
"""Cosines and sines of the tokens' positions, each [T, D / 2]."""


def run_layer(
    x: jax.Array,
    seen: jax.Array,
    layer: dict[str, Any],
    rotation: Rotation | None,
    attend: Attend[Kept],
    *,
    config: ModelConfig,
    norm: Norm,
) -> tuple[jax.Array, Kept]:
    """Add to x [T, E] what attention makes of ``seen`` [T, I], mostly x after a norm, and then the feed-forward block.

    ``rotation`` is None for a layer without RoPE. Returns [T, E], and what ``attend`` returns besides.
    """
    q, k, v = _qkv(seen, layer, config, norm)
    if rotation is not None:
        q, k = apply_rope(q, rotation), apply_rope(k, rotation)
    attended, kept = attend(q, k, v)
    x = x + linear(attended.reshape(x.shape[0], -1), layer["o"], layer.get("o_bias"))
    return x + gated_mlp(norm(x, layer["post_norm"]), layer), kept


def _qkv(
    x: jax.Array, layer: dict[str, Any], config: ModelConfig, norm: Norm
) -> tuple[jax.Array, jax.Array, jax.Array]:
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    merged = linear(x, layer["qkv"], layer.get("qkv_bias")).reshape(x.shape[0], heads + 2 * kv_heads, dim)
    q, k, v = jnp.split(merged, [heads, heads + kv_heads], axis=1)
    if config.qk_norm:
        q, k = norm(q, layer["q_norm"]), norm(k, layer["k_norm"])
    return q, k, v
