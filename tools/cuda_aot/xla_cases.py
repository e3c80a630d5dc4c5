"""Operations that XLA keeps: how many kernels they become, and what they leave in memory between them."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from cuda_aot.case import Case, Make, array
from cuda_aot.targets import Target
from jaxserve.layers import apply_rope
from pallas_kernels.kv_write import kv_write
from pallas_kernels.rms_norm import rms_norm

__all__ = ["XLA_OPS"]

_TOKENS, _SIZE, _FFW, _VOCAB, _RANK, _SLOTS = 64, 4096, 14336, 128256, 16, 8
_GROUP = 32


def _norm(target: Target) -> Case:
    def norm(x: jax.Array, residual: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = x + residual
        return x, rms_norm(x, weight, 1e-5)

    return Case(norm, (array(_TOKENS, _SIZE), array(_TOKENS, _SIZE), array(_SIZE)))


def _rope(target: Target) -> Case:
    table = array(_TOKENS, 64, dtype="float32")
    return Case(apply_rope, (array(_TOKENS, 32, 128), (table, table)))


def _silu(target: Target) -> Case:
    def gated(x: jax.Array) -> jax.Array:
        gate, up = jnp.split(x, 2, axis=-1)
        return jax.nn.silu(gate) * up

    return Case(gated, (array(_TOKENS, 2 * _FFW),))


def _kv_write(target: Target) -> Case:
    pool = array(4096, 16, 8, 128)
    new = array(_TOKENS, 8, 128)
    return Case(
        kv_write, ((pool, pool), new, new, array(_TOKENS, dtype="int32")), donate=(0,), pool="bf16[4096,16,8,128]"
    )


def _per_channel(target: Target, *, dtype: str) -> Case | None:
    if dtype == "float8_e4m3fn" and (target.major, target.minor) < (8, 9):
        return None

    def product(x: jax.Array, weight: jax.Array, scale: jax.Array) -> jax.Array:
        return jnp.dot(x, weight.astype(x.dtype), preferred_element_type=jnp.float32) * scale

    return Case(product, (array(_TOKENS, _SIZE), array(_SIZE, _SIZE, dtype=dtype), array(_SIZE, dtype="float32")))


def _per_group(target: Target) -> Case:
    """4-bit values, two in a byte, with a scale and an offset for 32 inputs."""

    def product(x: jax.Array, packed: jax.Array, scale: jax.Array, offset: jax.Array) -> jax.Array:
        values = jnp.stack([packed & 15, packed >> 4], 1).astype(x.dtype).reshape(-1, _GROUP, packed.shape[1])
        weight = values * scale[:, None] + offset[:, None]
        return jnp.dot(x, weight.reshape(-1, packed.shape[1]), preferred_element_type=jnp.float32)

    groups = array(_SIZE // _GROUP, _SIZE)
    return Case(product, (array(_TOKENS, _SIZE), array(_SIZE // 2, _SIZE, dtype="uint8"), groups, groups))


def _lora(target: Target) -> Case:
    """Each token with the adapter of its row."""

    def delta(x: jax.Array, a: jax.Array, b: jax.Array, slots: jax.Array) -> jax.Array:
        return jnp.einsum("tr,tro->to", jnp.einsum("ti,tir->tr", x, a[slots]), b[slots])

    bank = array(_SLOTS, _SIZE, _RANK), array(_SLOTS, _RANK, _SIZE)
    return Case(delta, (array(_TOKENS, _SIZE), *bank, array(_TOKENS, dtype="int32")))


def _greedy(target: Target) -> Case:
    return Case(partial(jnp.argmax, axis=-1), (array(_TOKENS, _VOCAB, dtype="float32"),))


def _sort(target: Target) -> Case:
    """What a top-p by sorting would start with."""
    return Case(partial(jnp.sort, axis=-1), (array(_TOKENS, _VOCAB, dtype="float32"),))


_OPS: dict[str, Any] = {
    "rms_norm": _norm,
    "rope": _rope,
    "silu_mul": _silu,
    "kv_write": _kv_write,
    "int8 product, scale per channel": partial(_per_channel, dtype="int8"),
    "float8 product, scale per channel": partial(_per_channel, dtype="float8_e4m3fn"),
    "int4 product, scale per group": _per_group,
    "lora of decodes": _lora,
    "argmax": _greedy,
    "sort": _sort,
}
XLA_OPS: dict[str, Make] = {f"xla/{name}": make for name, make in _OPS.items()}
