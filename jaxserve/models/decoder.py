"""The decoder, and the only loop over layers.

Llama's architecture with the options of ``ModelConfig``; every family that is served is one of its settings. The loop
is unrolled at trace time over per-layer weights and per-layer KV pools.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxserve.layers import (
    KVCache,
    KVLayer,
    apply_rope,
    attention,
    embed,
    gated_mlp,
    linear,
    rope_table,
    unembed,
)
from jaxserve.models.config import ModelConfig
from pallas_kernels.paged_attention import AttentionPlan
from pallas_kernels.rms_norm import rms_norm

__all__ = ["DecoderInput", "decode", "logits"]


@struct.dataclass
class DecoderInput:
    """The tokens of one step.

    Attributes:
        tokens: [T] int32 token ids.
        positions: [T] int32 position of each in its row.
        slots: [T] int32 where its KV goes (block * S + offset; out of range for padding).
        plan: the step's attention work.
    """

    tokens: jax.Array
    positions: jax.Array
    slots: jax.Array
    plan: AttentionPlan


def decode(
    params: dict[str, Any], config: ModelConfig, step: DecoderInput, kv: KVCache, *, backend: str
) -> tuple[jax.Array, KVCache]:
    """Run all layers over the step's tokens.

    Returns hidden states after the final norm [T, E], in the dtype of the weights, and the updated cache.
    """
    x = embed(params["embed"], step.tokens)
    table = _rotation(step, config)
    pools = []
    for i, (layer, pool) in enumerate(zip(params["layers"], kv.layers, strict=True)):
        rotation = table if config.rope_layers[i] else None
        x, pool = _layer(x, layer, pool, rotation, step, config=config, window=config.windows[i], backend=backend)
        pools.append(pool)
    return rms_norm(x, params["final_norm"], config.rms_eps, backend=backend), KVCache(tuple(pools))


def logits(params: dict[str, Any], hidden: jax.Array) -> jax.Array:
    """Logits [R, V] float32 of hidden states [R, E]."""
    return unembed(hidden, params.get("lm_head", params["embed"]))


def _rotation(step: DecoderInput, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """The RoPE table of a step, computed once.

    XLA fuses what looks cheap into all that uses it: sines and cosines of every layer and head, 8 % of a step on the
    CPU, where an optimization barrier does not hold it back. The result of a condition is never fused; this one is
    always true, which XLA cannot know.
    """

    def table(positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        return rope_table(positions, config)

    def nothing(positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        empty = jnp.zeros((positions.shape[0], config.head_dim // 2))
        return empty, empty

    return jax.lax.cond(step.plan.num_decode >= 0, table, nothing, step.positions)


# Jitted on its own so that equal layers are traced and lowered once; XLA inlines the calls.
@partial(jax.jit, static_argnames=("config", "window", "backend"))
def _layer(
    x: jax.Array,
    layer: dict[str, Any],
    pool: KVLayer,
    rotation: tuple[jax.Array, jax.Array] | None,
    step: DecoderInput,
    *,
    config: ModelConfig,
    window: int | None,
    backend: str,
) -> tuple[jax.Array, KVLayer]:
    norm = partial(rms_norm, eps=config.rms_eps, backend=backend)
    q, k, v = _qkv(norm(x, layer["input_norm"]), layer, config, norm)
    if rotation is not None:
        q, k = apply_rope(q, rotation), apply_rope(k, rotation)
    attended, pool = attention(
        q, k, v, pool, step.slots, step.plan, window=window, soft_cap=config.soft_cap, backend=backend
    )
    x = x + linear(attended.reshape(x.shape[0], -1), layer["o"], layer.get("o_bias"))
    return x + gated_mlp(norm(x, layer["post_norm"]), layer), pool


def _qkv(
    x: jax.Array, layer: dict[str, Any], config: ModelConfig, norm: Callable[[jax.Array, jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    merged = linear(x, layer["qkv"], layer.get("qkv_bias")).reshape(x.shape[0], heads + 2 * kv_heads, dim)
    q, k, v = jnp.split(merged, [heads, heads + kv_heads], axis=1)
    if config.qk_norm:
        q, k = norm(q, layer["q_norm"]), norm(k, layer["k_norm"])
    return q, k, v
