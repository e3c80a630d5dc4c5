"""The decoder, and the only loop over layers.

Llama's architecture with the options of ``ModelConfig``; every family that is served is one of its settings. The loop
is unrolled at trace time over per-layer weights and per-layer KV pools.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxserve.layers import KVCache, KVLayer, attention, embed, rope_table, unembed
from jaxserve.models.config import ModelConfig
from jaxserve.models.layer import Attend, Rotation, run_layer
from pallas_kernels.paged_attention import AttentionPlan
from pallas_kernels.rms_norm import rms_norm

__all__ = ["DecoderInput", "decode", "logits", "paged_attend", "rotation_of", "state_size"]


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
    params: dict[str, Any],
    config: ModelConfig,
    step: DecoderInput,
    kv: KVCache,
    *,
    backend: str,
    taps: tuple[int, ...] = (),
) -> tuple[jax.Array, KVCache]:
    """Run all layers over the step's tokens.

    Returns hidden states after the final norm [T, E], in the dtype of the weights, and the updated cache. What that
    keeps of states are these, or what goes into the layers ``taps``, side by side.
    """
    x = embed(params["embed"], step.tokens)
    table = rotation_of(step, config)
    pools, tapped = [], {}
    for i, (layer, pool) in enumerate(zip(params["layers"], kv.layers, strict=True)):
        if i in taps:
            tapped[i] = x
        rotation = table if config.rope_layers[i] else None
        x, pool = _layer(x, layer, pool, rotation, step, config=config, window=config.windows[i], backend=backend)
        pools.append(pool)
    hidden = rms_norm(x, params["final_norm"], config.rms_eps, backend=backend)
    kv = KVCache(tuple(pools), kv.states)
    if kv.states is not None:
        kv = kv.keep(jnp.concatenate([tapped[i] for i in taps] or [hidden], axis=1), step.slots)
    return hidden, kv


def state_size(config: ModelConfig, taps: tuple[int, ...] | None) -> int:
    """Size of what is kept of a token for a reader of ``taps`` (see ``decode``); 0 for None."""
    return 0 if taps is None else config.hidden_size * max(1, len(taps))


def logits(params: dict[str, Any], hidden: jax.Array) -> jax.Array:
    """Logits [R, V] float32 of hidden states [R, E]."""
    return unembed(hidden, params.get("lm_head", params["embed"]))


def rotation_of(step: DecoderInput, config: ModelConfig) -> Rotation:
    """The RoPE table of a step, computed once.

    XLA fuses what looks cheap into all that uses it: sines and cosines of every layer and head, 8 % of a step on the
    CPU, where an optimization barrier does not hold it back. The result of a condition is never fused; this one is
    always true, which XLA cannot know.
    """

    def table(positions: jax.Array) -> Rotation:
        return rope_table(positions, config)

    def nothing(positions: jax.Array) -> Rotation:
        empty = jnp.zeros((positions.shape[0], config.head_dim // 2))
        return empty, empty

    return jax.lax.cond(step.plan.num_decode >= 0, table, nothing, step.positions)


# Jitted on its own so that equal layers are traced and lowered once; XLA inlines the calls.
@partial(jax.jit, static_argnames=("config", "window", "backend"))
def _layer(
    x: jax.Array,
    layer: dict[str, Any],
    pool: KVLayer,
    rotation: Rotation | None,
    step: DecoderInput,
    *,
    config: ModelConfig,
    window: int | None,
    backend: str,
) -> tuple[jax.Array, KVLayer]:
    norm = partial(rms_norm, eps=config.rms_eps, backend=backend)
    attend = paged_attend(pool, step, config, window=window, backend=backend)
    return run_layer(x, norm(x, layer["input_norm"]), layer, rotation, attend, config=config, norm=norm)


def paged_attend(
    pool: KVLayer, step: DecoderInput, config: ModelConfig, *, window: int | None, backend: str
) -> Attend[KVLayer]:
    """Attention over a layer's blocks, for ``run_layer``; it returns the layer's pools with the step's keys and
    values."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, KVLayer]:
        return attention(q, k, v, pool, step.slots, step.plan, window=window, soft_cap=config.soft_cap, backend=backend)

    return attend
