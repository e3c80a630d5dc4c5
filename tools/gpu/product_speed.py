"""Products with weights of 4 and 8 bits, and with adapters, against what XLA makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from gpu.products import chain, lora_chain, random_adapters, random_vectors, random_weight
from gpu.results import Result
from gpu.session import Session, short
from gpu.timing import in_threads, measure
from pallas_kernels.lora_matmul import reference as lora_reference
from pallas_kernels.packed_matmul import reference as packed_reference

__all__ = ["product_speed"]

_SIZE, _DRY_SIZE = 4096, 64
_WEIGHTS = 24  # of a chain: at 4 bits 250 MB
_TOKENS, _LORA_TOKENS = (1, 16, 64, 256, 2048), (256, 2048)
_RANK = 16
_SECONDS = 6.0  # that a shape takes, compiling it included


def product_speed(session: Session) -> Iterator[Result]:
    """Time per product, and of the same product by XLA, with the same weight and with one of bfloat16."""
    size, count = (_DRY_SIZE, 1) if session.dry else (_SIZE, _WEIGHTS)
    shape = (size, size)
    floats = [jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) * size**-0.5 for i in range(count)]
    for kind in ("int8",) if session.dry else ("int4", "int8"):
        weights = [random_weight(kind, *shape, seed) for seed in range(count)]
        for tokens in (3,) if session.dry else _TOKENS:
            what = f"{kind}, {size}², {tokens} tokens"
            runs: dict[str, tuple[Callable[..., Any], Any]] = {
                "kernel": (chain(session.packed_matmul), weights),
                "XLA": (chain(partial(packed_reference.packed_matmul, activation_bits=16)), weights),
                "bfloat16": (chain(partial(jnp.dot, preferred_element_type=jnp.float32)), floats),
            }
            num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(weights[0]))
            yield from _compared(session, what, tokens, size, num_bytes, runs)
    for tokens in (70,) if session.dry else _LORA_TOKENS:
        adapters = [random_adapters(tokens, size, _RANK, size, "bfloat16") for _ in range(count)]
        num_bytes = 3 * 2 * 2 * size * _RANK + tokens * size * (2 + 4)
        runs = {
            "kernel": (lora_chain(session.lora_matmul), adapters),
            "XLA": (lora_chain(lora_reference.lora_matmul), adapters),
        }
        yield from _compared(
            session, f"adapters of rank {_RANK}, {size}², {tokens} tokens", tokens, size, num_bytes, runs
        )


def _compared(
    session: Session,
    what: str,
    tokens: int,
    size: int,
    num_bytes: int,
    runs: dict[str, tuple[Callable[..., Any], Any]],
) -> Iterator[Result]:
    """The kernel's figures, and how much longer the others take."""
    if session.clock.left < _SECONDS:
        yield Result(what, note="no time left")
        return
    x = random_vectors(tokens, size, "bfloat16")
    compiled = in_threads(
        {name: partial(session.compile, run, x, weights) for name, (run, weights) in runs.items()}, session.threads
    )
    seconds: dict[str, float] = {}
    for name, program in compiled.items():
        if isinstance(program, Exception):
            yield Result(f"{what}: {name}", note=short(program))
        else:
            weights = runs[name][1]
            seconds[name] = measure(partial(program, x, weights), calls=len(weights)).seconds
    if "kernel" in seconds:
        own = seconds.pop("kernel")
        others = {f"× {name}": other / own for name, other in seconds.items()}
        yield Result(what, {**session.moved(num_bytes, own), **others})
