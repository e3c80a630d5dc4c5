"""Operations that XLA keeps: how many kernels they become, and what they leave in memory between them."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from cuda_aot.case import Case, Make, array
from cuda_aot.kernel_cases import packed_weight
from cuda_aot.targets import Target
from jaxserve.layers import apply_rope
from jaxserve.sampling.arrays import make_sampling_input
from jaxserve.sampling.filters import keep_likely
from pallas_kernels import lora_matmul, packed_matmul
from pallas_kernels.kv_write import kv_write
from pallas_kernels.rms_norm import rms_norm

__all__ = ["XLA_OPS"]

_TOKENS, _SIZE, _FFW, _VOCAB, _RANK, _SLOTS = 64, 4096, 14336, 128256, 16, 8
_CHUNK = 512  # tokens of a prompt


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
    if dtype == "float8_e4m3fn" and target.capability < 89:
        return None

    def product(x: jax.Array, weight: jax.Array, scale: jax.Array) -> jax.Array:
        return jnp.dot(x, weight.astype(x.dtype), preferred_element_type=jnp.float32) * scale

    return Case(product, (array(_TOKENS, _SIZE), array(_SIZE, _SIZE, dtype=dtype), array(_SIZE, dtype="float32")))


def _per_group(target: Target, *, kind: str) -> Case:
    """The reference backend, which unpacks to float32."""
    return Case(packed_matmul.packed_matmul, (array(_TOKENS, _SIZE), packed_weight(kind, _SIZE, _SIZE)))


def _per_group_in_halves(target: Target, *, kind: str) -> Case:
    """The same in x's dtype, which is the least that XLA could write out."""

    def product(x: jax.Array, weight: packed_matmul.PackedWeight) -> jax.Array:
        return jnp.dot(x, packed_matmul.unpack(weight).astype(x.dtype), preferred_element_type=jnp.float32)

    return Case(product, (array(_TOKENS, _SIZE), packed_weight(kind, _SIZE, _SIZE)))


def _lora(target: Target, *, tokens: int) -> Case:
    """Each token with the adapter of its row, by the reference backend."""

    def delta(x: jax.Array, weights: lora_matmul.LoraWeights, slots: jax.Array) -> jax.Array:
        return lora_matmul.lora_matmul(x, weights, jnp.int32(1), lora_matmul.make_plan(slots, _SLOTS))

    factor, ranks = array(_SLOTS - 1, 2, _RANK, _SIZE), array(_SLOTS - 1, 2, 1, dtype="int32")
    weights = lora_matmul.LoraWeights(factor, factor, ranks, (_SIZE,))
    return Case(delta, (array(tokens, _SIZE), weights, array(tokens, dtype="int32")))


def _greedy(target: Target) -> Case:
    return Case(partial(jnp.argmax, axis=-1), (array(_TOKENS, _VOCAB, dtype="float32"),))


def _threshold(target: Target) -> Case:
    """Top-k and top-p as the sampler computes them."""
    return Case(keep_likely, (array(_TOKENS, _VOCAB, dtype="float32"), make_sampling_input([], _TOKENS, 0)))


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
    **{f"{kind} product, scale per group": partial(_per_group, kind=kind) for kind in ("int4", "int8")},
    **{
        f"{kind} product, scale per group, bfloat16": partial(_per_group_in_halves, kind=kind)
        for kind in ("int4", "int8")
    },
    "lora of decodes": partial(_lora, tokens=_TOKENS),
    "lora of prompts": partial(_lora, tokens=_CHUNK),
    "argmax": _greedy,
    "top-k and top-p by threshold": _threshold,
    "sort": _sort,
}
XLA_OPS: dict[str, Make] = {f"xla/{name}": make for name, make in _OPS.items()}
