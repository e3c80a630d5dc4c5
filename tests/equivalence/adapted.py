"""Random adapters for the tiny model, and the model with one of them merged into its weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxserve.lora.layout import Factors, Layout
from tests.equivalence.harness import MODEL, params

__all__ = ["KEYS", "LAYOUT", "Shelf", "merged_params"]

LAYOUT = Layout(MODEL, max_rank=6, dtype=np.dtype("float32"))
KEYS = (b"style", b"format", b"persona")

_RANKS = {b"style": 6, b"format": 1, b"persona": 3}
_SKIPPED = {b"format": ("k", "gate", "down"), b"persona": ("q", "v", "o")}


@cache
def _factors(key: bytes) -> dict[tuple[int, str], Factors]:
    rng, rank = np.random.default_rng(list(key)), _RANKS[key]
    inner = [(name, p.size_in, size) for p in LAYOUT.products.values() for name, size in p.parts.items()]
    return {
        (layer, name): Factors(
            rng.normal(0, 0.3, (rank, size_in)).astype(np.float32), rng.normal(0, 0.3, (rank, size)).astype(np.float32)
        )
        for layer in range(MODEL.num_layers)
        for name, size_in, size in inner
        if name not in _SKIPPED.get(key, ())
    }


@cache
def merged_params(key: bytes) -> dict[str, Any]:
    """The model's parameters with an adapter in them."""

    def changed(layer: int, name: str, weight: Any) -> Any:
        product = LAYOUT.products.get(name)
        if product is None:
            return weight
        none = Factors(np.zeros((1, product.size_in)), np.zeros((1, 1)))
        parts = [(_factors(key).get((layer, part), none), size) for part, size in product.parts.items()]
        return weight + jnp.asarray(
            np.concatenate([own.a.T @ np.broadcast_to(own.b, (len(own.b), size)) for own, size in parts], 1),
            jnp.float32,
        )

    layers = [
        {name: changed(i, name, weight) for name, weight in layer.items()} for i, layer in enumerate(params()["layers"])
    ]
    return {**params(), "layers": layers}


class Shelf:
    """All adapters of ``KEYS``; one is ready when it was asked for twice."""

    def __init__(self) -> None:
        self._asked: set[bytes] = set()

    def is_live(self, key: bytes) -> bool:
        return True

    def fetch(self, key: bytes) -> Sequence[Any] | None:
        if key not in self._asked:
            self._asked.add(key)
            return None
        return list(LAYOUT.pieces(_factors(key)))
