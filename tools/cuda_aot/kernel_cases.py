"""The Pallas kernels, in the shapes that models have.

One function per operation gives its cases by name: ``operation/shape/…``. A new kernel registers in ``KERNELS``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from cuda_aot.case import Case, Make, array
from cuda_aot.targets import Target
from pallas_kernels import lora_matmul
from pallas_kernels.lora_matmul import triton as lora_triton
from pallas_kernels.packed_matmul import GROUP, PANEL, PackedWeight
from pallas_kernels.packed_matmul import triton as packed_triton
from pallas_kernels.paged_attention import Backend, make_plan, mosaic, triton

__all__ = ["KERNELS", "packed_weight"]

_ROWS, _CHUNK, _BLOCKS, _TABLE = 64, 512, 4096, 512
_SLOTS = 9  # of adapters

# H, K, D of models: Llama 3 8B and 70B, SmolLM2-135M, Gemma 3 (D = 256), Phi-3 mini (D = 96).
_HEADS = {
    "32x8x128": (32, 8, 128),
    "64x8x128": (64, 8, 128),
    "9x3x64": (9, 3, 64),
    "8x4x256": (8, 4, 256),
    "32x32x96": (32, 32, 96),
}


def _attention(
    target: Target,
    *,
    heads: tuple[int, int, int],
    pool: str = "bfloat16",
    queries: int = 1,
    chunk: bool = False,
    tree: bool = False,
    backend: Backend = triton.paged_attention,
    **options: Any,
) -> Case | None:
    """Attention of decodes of ``queries`` tokens each, and with ``chunk`` of a prompt chunk beside them."""
    if backend is mosaic.paged_attention and target.major != 9:
        return None
    if pool == "float8_e4m3fn" and target.capability < 89:
        return None
    num_heads, kv_heads, dim = heads
    tokens = _ROWS * queries + chunk * _CHUNK
    scaled = pool in ("int8", "float8_e4m3fn", "float8_e5m2")
    floats = "bfloat16" if scaled else pool

    def attend(
        q: Any, k: Any, v: Any, scales: Any, start: Any, lens: Any, tables: Any, num: Any, mask: Any
    ) -> jax.Array:
        plan = make_plan(
            start, lens, tables, num, num_tokens=tokens, decode_queries=queries, has_prefill=chunk, tree=mask
        )
        return backend(q, k, v, plan, scale=dim**-0.5, **scales, **options)

    cache = array(_BLOCKS, 16, kv_heads, dim, dtype=pool)
    scale = array(_BLOCKS, 16, kv_heads, dtype="float32")
    ints = partial(array, dtype="int32")
    mask = array(_ROWS, queries, -(-queries // 32), dtype="uint32") if tree else None
    return Case(
        attend,
        (
            array(tokens, num_heads, dim, dtype=floats),
            cache,
            cache,
            {"k_scale": scale, "v_scale": scale} if scaled else {},
            ints(_ROWS + 1),
            ints(_ROWS),
            ints(_ROWS, _TABLE),
            jax.ShapeDtypeStruct((), jnp.int32),
            mask,
        ),
    )


def _attention_cases() -> dict[str, Make]:
    decode = {f"decode/{name}": {"heads": heads} for name, heads in _HEADS.items()}
    mixed = {f"mixed/{name}": {"heads": heads, "chunk": True} for name, heads in _HEADS.items()}
    heads = _HEADS["32x8x128"]
    pools = {
        f"{kind}/32x8x128/{pool}": {"heads": heads, "pool": pool, "chunk": kind == "mixed"}
        for kind in ("decode", "mixed")
        for pool in ("float32", "float16", "int8", "float8_e4m3fn", "float8_e5m2")
    }
    rest = {
        "verify/32x8x128/4": {"heads": heads, "queries": 4},
        "verify/32x8x128/16 of a tree": {"heads": heads, "queries": 16, "tree": True},
        "mixed/32x8x128/window and soft cap": {"heads": heads, "chunk": True, "window": 1024, "soft_cap": 50.0},
    }
    on_hopper = {
        "decode/32x8x128": {"heads": heads},
        "decode/9x3x64": {"heads": _HEADS["9x3x64"], "pool": "float16"},
        "verify/32x8x128/4, window and soft cap": {"heads": heads, "queries": 4, "window": 1024, "soft_cap": 50.0},
        "mixed/32x8x128/2": {"heads": heads, "queries": 2, "chunk": True},
    }
    mosaics = {f"mosaic {name}": {**case, "backend": mosaic.paged_attention} for name, case in on_hopper.items()}
    named: dict[str, dict[str, Any]] = {**decode, **mixed, **pools, **rest, **mosaics}
    return {f"paged_attention/{name}": partial(_attention, **options) for name, options in named.items()}


def packed_weight(kind: str, size_in: int, size_out: int, *, offset: bool = True) -> PackedWeight:
    """An abstract weight [I, O] of kind int4 or int8; without offsets it is what int8 on load makes."""
    panels = -(-size_out // PANEL)
    data: Any
    if kind == "int4":
        data = array(panels, size_in // 8, PANEL, dtype="uint32")
    else:
        data = array(panels, size_in // 2, PANEL, 2, dtype="int8")
    groups: Any = array(panels, size_in // GROUP, PANEL, dtype="float16")
    return PackedWeight(data, groups, groups if offset else None, size_out=size_out)


def _product(
    target: Target,
    *,
    kind: str,
    tokens: int,
    sizes: tuple[int, int] = (4096, 4096),
    dtype: str = "bfloat16",
    offset: bool = True,
) -> Case:
    weight = packed_weight(kind, *sizes, offset=offset)
    return Case(packed_triton.packed_matmul, (array(tokens, sizes[0], dtype=dtype), weight))


def _product_cases() -> dict[str, Make]:
    """Of all classes of steps; of Llama 3 8B, its down projection among them, and of SmolLM2-135M the logits."""
    named: dict[str, dict[str, Any]] = {}
    for kind in ("int4", "int8"):
        named |= {f"{kind}/4096x4096/{tokens}": {"kind": kind, "tokens": tokens} for tokens in (16, 64, 200, 2048)}
        for tokens in (64, 2048):
            named[f"{kind}/4096x4096/{tokens}/float32"] = {"kind": kind, "tokens": tokens, "dtype": "float32"}
    for tokens in (64, 2048):
        named[f"int8/4096x4096/{tokens}/no offset"] = {"kind": "int8", "tokens": tokens, "offset": False}
    for sizes in ((14336, 4096), (576, 49152)):
        for tokens in (64, 2048):
            name = f"int4/{'x'.join(map(str, sizes))}/{tokens}"
            named[name] = {"kind": "int4", "tokens": tokens, "sizes": sizes}
    return {f"packed_matmul/{name}": partial(_product, **options) for name, options in named.items()}


def _adapters(target: Target, *, size_in: int, rank: int, dtype: str) -> Case:
    def add(x: jax.Array, weights: lora_matmul.LoraWeights, slots: jax.Array) -> jax.Array:
        return lora_triton.lora_matmul(x, weights, jax.numpy.int32(1), lora_matmul.make_plan(slots, _SLOTS))

    a, b = array(_SLOTS - 1, 2, 3 * rank, size_in, dtype=dtype), array(_SLOTS - 1, 2, rank, 4096, dtype=dtype)
    weights = lora_matmul.LoraWeights(a, b, array(_SLOTS - 1, 2, 3, dtype="int32"), (2048, 1024, 1024))
    return Case(add, (array(_CHUNK, size_in, dtype=dtype), weights, array(_CHUNK, dtype="int32")))


def _adapter_cases() -> dict[str, Make]:
    return {
        f"lora_matmul/{size_in}x4096/{rank}/{dtype}": partial(_adapters, size_in=size_in, rank=rank, dtype=dtype)
        for dtype in ("bfloat16", "float32")
        for size_in in (4096, 14336)
        for rank in (16, 64, 128, 256, 512)
    }


KERNELS: dict[str, Make] = {**_attention_cases(), **_product_cases(), **_adapter_cases()}
