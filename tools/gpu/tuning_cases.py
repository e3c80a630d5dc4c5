"""What is tuned: launches in the shape classes that models have, and what is tried for each.

Candidates are what compiles without spills for sm_90 in ``tools/compile_kernels.py``, and their neighbours: how many
keys or inputs a step has, how deep the pipeline is, how many warps share a tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from gpu.products import chain as product_chain
from gpu.products import lora_chain, random_adapters, random_vectors, random_weight
from gpu.ragged import BLOCK_SIZE, Heads, Rows, chain, make_batch, make_pools
from gpu.session import Session
from gpu.tune import Changes, Launch, Work
from pallas_kernels.lora_matmul import triton as lora
from pallas_kernels.packed_matmul import triton as packed
from pallas_kernels.paged_attention import triton as attention

__all__ = ["LAUNCHES"]

_SIZE, _DRY_SIZE = 4096, 64
_WEIGHTS = 24  # of a chain of products


def _sizes(names: str, *rows: str) -> list[Changes]:
    """Candidates from a table: names of sizes, and a number for each."""
    return [dict(zip(names.split(), map(int, row.split()), strict=True)) for row in rows]


_DECODE = _sizes(
    "keys num_warps num_stages",
    *("64 4 3", "64 4 2", "64 4 5", "64 8 3", "32 4 3", "32 4 5", "32 2 3", "32 2 5", "128 4 2", "128 8 3"),
)
_PREFILL = _sizes(
    "rows keys num_warps num_stages",
    *("64 64 4 3", "64 64 8 3", "64 64 4 2", "64 32 4 3", "64 128 4 2", "64 128 8 3", "128 64 8 3", "128 64 8 2"),
    *("128 128 8 2", "128 32 8 3"),
)
_PACKED_FEW = _sizes(
    "columns groups splits num_warps num_stages",
    *("64 4 8 4 4", "64 4 8 4 3", "64 4 8 2 4", "32 4 8 4 4", "32 4 8 2 4", "128 4 8 4 3", "64 8 4 4 3", "64 4 16 4 4"),
    *("32 4 16 2 4", "64 4 4 4 5"),
)
_PACKED_MANY = _sizes(
    "columns tokens groups num_warps num_stages",
    *(
        "128 128 4 8 3",
        "128 128 4 8 2",
        "128 128 4 4 3",
        "64 128 4 4 3",
        "128 64 4 4 3",
        "64 64 4 4 3",
        "128 256 4 8 3",
    ),
    *("256 128 4 8 2",),
)
_LORA = _sizes(
    "inputs columns num_warps num_stages",
    *("64 128 4 4", "64 128 4 3", "128 128 4 3", "128 64 4 3", "64 64 4 4", "32 128 4 4", "64 256 8 3", "64 64 2 4"),
)


def _attention(session: Session, *, kind: str, rows: Rows, heads: Heads, pool: str, dry_rows: Rows) -> Work:
    rows, heads = (dry_rows, Heads(4, 2, heads.head_dim // 4)) if session.dry else (rows, heads)
    blocks = sum(-(-tokens // BLOCK_SIZE) for _, tokens in rows)
    pools = make_pools(2 * blocks + 1, heads, pool)
    batch = make_batch(rows, pools, heads, calls=1 if session.dry else None)

    def make(sizes: attention.Sizes) -> Callable[..., Any]:
        own = partial(attention.paged_attention, interpret=session.dry, **{kind: sizes})
        return chain(own, has_prefill=kind == "prefill")

    return Work(make, (batch, pools), len(batch.tables))


def _packed(session: Session, *, tokens: int, kind: str) -> Work:
    size, count = (_DRY_SIZE, 1) if session.dry else (_SIZE, _WEIGHTS)
    weights = [random_weight(kind, size, size, seed) for seed in range(count)]

    def make(sizes: packed.Sizes) -> Callable[..., Any]:
        return product_chain(partial(packed.packed_matmul, sizes=sizes, interpret=session.dry))

    return Work(make, (random_vectors(tokens, size, "bfloat16"), weights), count)


def _lora(session: Session, *, rank: int) -> Work:
    tokens, size, count = (70, _DRY_SIZE, 1) if session.dry else (2048, _SIZE, _WEIGHTS)
    adapters = [random_adapters(tokens, size, rank, size, "bfloat16") for _ in range(count)]

    def make(sizes: lora.Sizes) -> Callable[..., Any]:
        return lora_chain(partial(lora.lora_matmul, sizes=sizes, interpret=session.dry))

    return Work(make, (random_vectors(tokens, size, "bfloat16"), adapters), count)


def _attention_launches() -> list[Launch]:
    shapes: Sequence[tuple[str, Heads, str]] = (
        ("b2/d128", Heads(32, 8, 128), "bfloat16"),
        ("b2/d64", Heads(32, 8, 64), "bfloat16"),
        ("b1/d128", Heads(32, 8, 128), "int8"),
        ("b2/d256", Heads(16, 8, 256), "bfloat16"),
    )
    kinds: Sequence[tuple[str, list[Changes], Rows, Rows]] = (
        ("decode", _DECODE, [(1, 4096)] * 32, [(1, 30), (1, 5)]),
        ("prefill", _PREFILL, [(512, 4096)] * 4, [(20, 30)]),
    )
    return [
        Launch(
            "paged_attention",
            f"{kind}/{name}",
            attention.Sizes,
            candidates,
            partial(_attention, kind=kind, rows=rows, heads=heads, pool=pool, dry_rows=dry_rows),
        )
        for name, heads, pool in shapes
        for kind, candidates, rows, dry_rows in kinds
    ]


def _product_launches() -> list[Launch]:
    steps = (("decode", 16, _PACKED_FEW), ("mixed", 128, _PACKED_FEW), ("prefill", 2048, _PACKED_MANY))
    found = [
        Launch(
            "packed_matmul",
            f"{step}/b2/{kind}",
            packed.Sizes,
            candidates,
            partial(_packed, tokens=tokens, kind=kind),
        )
        for kind in ("int4", "int8")
        for step, tokens, candidates in steps
    ]
    return found + [
        Launch("lora_matmul", f"b2/r{rank}", lora.Sizes, _LORA, partial(_lora, rank=rank)) for rank in (16, 64)
    ]


LAUNCHES: list[Launch] = [*_attention_launches(), *_product_launches()]
"""Most valuable first."""
