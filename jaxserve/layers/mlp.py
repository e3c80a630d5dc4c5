"""The gated feed-forward block (SwiGLU, Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.layers.linear import linear

__all__ = ["gated_mlp"]


def gated_mlp(x: jax.Array, layer: dict[str, Any]) -> jax.Array:
    """x [T, E] through ``gate_up`` [E, 2F] (gate first) and ``down`` [F, E] of a layer's parameters -> [T, E]."""
    gate, up = jnp.split(linear(x, layer["gate_up"], layer.get("gate_up_bias")), 2, axis=-1)
    return linear(jax.nn.silu(gate) * up, layer["down"], layer.get("down_bias"))
