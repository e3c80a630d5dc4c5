"""Models with random weights that are made on the device, and runners of them: nothing travels from the host."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.models.config import ModelConfig
from jaxserve.models.registry import param_specs
from jaxserve.models.spec import ParamSpec, Use
from jaxserve.roofline import MODELS

__all__ = ["LLAMA_8B", "TINY", "random_params", "with_layers"]

LLAMA_8B = MODELS["llama-3.1-8b"]


def with_layers(config: ModelConfig, num_layers: int) -> ModelConfig:
    """The same model with another number of equal layers."""
    return replace(config, num_layers=num_layers, windows=(None,) * num_layers, rope_layers=(True,) * num_layers)


TINY = replace(
    with_layers(LLAMA_8B, 2),
    vocab_size=256,
    hidden_size=64,
    intermediate_size=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
)
"""For runs without a GPU."""


def random_params(config: ModelConfig, dtype: str = "bfloat16") -> dict[str, Any]:
    """Parameters as the decoder takes them. Norms are ones, matrices normal with variance 1 / fan-in."""
    keys = iter(jax.random.split(jax.random.key(0), 16 * (config.num_layers + 1)))

    def make(spec: ParamSpec) -> jax.Array:
        if spec.use is Use.VECTOR:
            return jnp.ones(spec.shape, dtype)
        fan_in = spec.size_in if spec.is_factor else config.hidden_size
        return _normal(next(keys), spec.shape, fan_in**-0.5, dtype)

    params: dict[str, Any] = jax.tree.map(make, param_specs(config, "hf"))
    return params


@partial(jax.jit, static_argnums=(1, 2, 3))
def _normal(key: jax.Array, shape: tuple[int, ...], scale: float, dtype: str) -> jax.Array:
    return jax.random.normal(key, shape, dtype) * jnp.asarray(scale, dtype)
