"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) and its scalings, half-split layout.

The table of a step is made once and shared by all layers. Frequencies are numpy constants at trace time, except for
``dynamic`` scaling, whose base grows with the context: here it is a function of each token's own position, so that a
prompt gives the same keys whole or in chunks. (transformers takes the length of the current call instead; both agree up
to the trained context.)
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxserve.models.config import ModelConfig, RopeScaling

__all__ = ["apply_rope", "rope_table"]


def rope_table(positions: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines [T, D / 2] float32 for positions [T]."""
    scaling = config.rope_scaling
    base = _frequencies(config.rope_theta, config.head_dim)
    factor = 1.0
    if scaling is None:
        angles = positions[:, None].astype(jnp.float32) * base
    elif scaling.kind == "dynamic":
        angles = positions[:, None].astype(jnp.float32) * _dynamic(positions, config, scaling)
    else:
        if scaling.kind == "yarn":
            factor = _yarn_attention_factor(scaling)
        angles = positions[:, None].astype(jnp.float32) * _scaled(base, config, scaling)
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def apply_rope(x: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate x [T, heads, D] by the table [T, D / 2], in float32; returned in x's dtype."""
    cos, sin = (part[:, None, :] for part in table)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _frequencies(theta: float, dim: int) -> NDArray[np.float32]:
    return (1.0 / theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)).astype(np.float32)


def _scaled(base: NDArray[np.float32], config: ModelConfig, scaling: RopeScaling) -> NDArray[np.float32]:
    if scaling.kind == "linear":
        return base / np.float32(scaling.factor)
    if scaling.kind == "factors":
        return np.asarray(base / np.asarray(scaling.factors, np.float32))
    if scaling.kind == "llama3":
        return _llama3(base, config, scaling)
    if scaling.kind == "yarn":
        return _yarn(base, config, scaling)
    raise ValueError(f"unknown RoPE scaling {scaling.kind!r}")


def _dynamic(positions: jax.Array, config: ModelConfig, scaling: RopeScaling) -> jax.Array:
    """NTK-aware base per token, [T, D / 2]."""
    dim = config.head_dim
    trained = scaling.original_max_position or config.max_position
    length = jnp.maximum(positions + 1, trained).astype(jnp.float32)
    growth = scaling.factor * length / trained - (scaling.factor - 1)
    theta = config.rope_theta * growth ** (dim / (dim - 2))
    return theta[:, None] ** (-np.arange(0, dim, 2, dtype=np.float32) / dim)


def _llama3(base: NDArray[np.float32], config: ModelConfig, scaling: RopeScaling) -> NDArray[np.float32]:
    """Long wavelengths are divided by the factor, short ones kept, those between blended (Llama 3.1)."""
    trained = scaling.original_max_position or config.max_position
    wavelength = 2 * math.pi / base
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = np.clip((trained / wavelength - low) / (high - low), 0.0, 1.0)
    return ((1 - blend) * base / scaling.factor + blend * base).astype(np.float32)


def _yarn(base: NDArray[np.float32], config: ModelConfig, scaling: RopeScaling) -> NDArray[np.float32]:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): interpolate slow dimensions, keep fast ones, ramp between."""
    dim = config.head_dim
    trained = scaling.original_max_position or config.max_position

    def dimension(rotations: float) -> float:
        return dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
    return (ramp * base / scaling.factor + (1 - ramp) * base).astype(np.float32)


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return mscale(scaling.mscale) / mscale(scaling.mscale_all_dim)
    return mscale(1.0)
