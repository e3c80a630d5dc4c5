"""Where an adapter's factors lie: the merged products of a model, and which projection is which part of one.

Letters: L layers, P parts of a product, R the largest rank of the bank, I inputs, O outputs of all parts, V tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxserve.models.config import ModelConfig

__all__ = ["EMBED", "LM_HEAD", "TARGETS", "Array", "Factors", "Layout", "Piece", "Product", "TablePiece"]

Array = NDArray[Any]

EMBED, LM_HEAD = "embed", "lm_head"
TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
"""Projections of a layer."""

_PIECE_BYTES = 4 << 20
"""What is copied to the device between two steps: a fraction of the time that a step takes."""

_RANK_BYTES = 4  # a part's own rank


class Product(NamedTuple):
    """A matrix of the model: its inputs, and the projections that stand side by side in it, with their outputs."""

    size_in: int
    parts: dict[str, int]


class Factors(NamedTuple):
    """What an adapter adds to one projection: x @ a.T @ b, with a [r, I] and b [r, O], scale included.

    For the embedding, a [V, r] is looked up and not multiplied.
    """

    a: Array
    b: Array

    @property
    def num_bytes(self) -> int:
        return self.a.nbytes + self.b.nbytes


class Piece(NamedTuple):
    """Arrays of some layers, in the shape of the bank: per product a [l, P * R, I], b [l, R, O] and ranks [l, P]."""

    first: np.int32
    products: dict[str, tuple[Array, Array, Array]]


class TablePiece(NamedTuple):
    """The same of the tables, l being 1, and what the embedding looks up [V, R]."""

    tables: dict[str, tuple[Array, Array, Array]]
    lookup: Array


@dataclass(frozen=True)
class Layout:
    """The products of a model that adapters may change.

    Attributes:
        model: the model.
        max_rank: R.
        dtype: of the factors, on host and device.
        targets: projections of a layer that adapters may change, some of ``TARGETS``.
        has_tables: whether adapters may change the embedding and the output head.
    """

    model: ModelConfig
    max_rank: int
    dtype: np.dtype[Any]
    targets: tuple[str, ...] = TARGETS
    has_tables: bool = False

    @property
    def products(self) -> dict[str, Product]:
        """Those of every layer that have a target in them, by their name in the parameter tree."""
        m = self.model
        heads, kv = m.num_heads * m.head_dim, m.num_kv_heads * m.head_dim
        products = {
            "qkv": Product(m.hidden_size, {"q": heads, "k": kv, "v": kv}),
            "o": Product(heads, {"o": m.hidden_size}),
            "gate_up": Product(m.hidden_size, {"gate": m.intermediate_size, "up": m.intermediate_size}),
            "down": Product(m.intermediate_size, {"down": m.hidden_size}),
        }
        return {name: product for name, product in products.items() if product.parts.keys() & set(self.targets)}

    @property
    def tables(self) -> dict[str, Product]:
        """Those beside the layers. What the embedding looks up is multiplied with the identity, rank by rank."""
        if not self.has_tables:
            return {}
        m = self.model
        return {
            EMBED: Product(self.max_rank, {EMBED: m.hidden_size}),
            LM_HEAD: Product(m.hidden_size, {LM_HEAD: m.vocab_size}),
        }

    def projections(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of what adapters may change, by name; for the embedding, tokens and outputs."""
        m = self.model
        parts = ((name, p.size_in, size) for p in self.products.values() for name, size in p.parts.items())
        found = {name: (size_in, size) for name, size_in, size in parts if name in self.targets}
        return found | {EMBED: (m.vocab_size, m.hidden_size), LM_HEAD: (m.hidden_size, m.vocab_size)}

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""
        lookup = self.model.vocab_size * self.max_rank * self.dtype.itemsize if self.has_tables else 0
        factors = self.model.num_layers * self._num_bytes(self.products) + self._num_bytes(self.tables)
        ranks = self.model.num_layers * _num_parts(self.products) + _num_parts(self.tables)
        return factors + ranks * _RANK_BYTES + lookup

    def _num_bytes(self, products: dict[str, Product]) -> int:
        sizes = (len(p.parts) * p.size_in + sum(p.parts.values()) for p in products.values())
        return self.max_rank * sum(sizes) * self.dtype.itemsize

    def layers_per_piece(self) -> int:
        """l: as many layers as fit into what is copied at a time."""
        return int(np.clip(_PIECE_BYTES // self._num_bytes(self.products), 1, self.model.num_layers))

    def pieces(self, factors: dict[tuple[int, str], Factors]) -> Iterator[Piece]:
        """An adapter's factors by (layer, projection), as what is copied to the device. All pieces have one shape."""
        size, count = self.layers_per_piece(), self.model.num_layers
        for start in range(0, count, size):
            first = min(start, count - size)
            layers = range(first, first + size)
            yield Piece(np.int32(first), {name: self._arrays(p, layers, factors) for name, p in self.products.items()})

    def table_piece(self, factors: dict[tuple[int, str], Factors]) -> TablePiece:
        """What an adapter changes beside the layers."""
        lookup = np.zeros((self.model.vocab_size, self.max_rank), self.dtype)
        own = factors.get((0, EMBED))
        if own is not None:
            lookup[:, : own.a.shape[1]] = own.a
        return TablePiece({name: self._table(name, factors) for name in self.tables}, lookup)

    def _table(self, name: str, factors: dict[tuple[int, str], Factors]) -> tuple[Array, Array, Array]:
        given = {key: value for key, value in factors.items() if key[1] == name}
        if name == EMBED:
            eye = np.eye(self.max_rank, dtype=self.dtype)
            given = {key: Factors(eye[: len(value.b)], value.b) for key, value in given.items()}
        return self._arrays(self.tables[name], range(1), given)

    def _arrays(
        self, product: Product, layers: range, factors: dict[tuple[int, str], Factors]
    ) -> tuple[Array, Array, Array]:
        parts, rank = product.parts, self.max_rank
        a = np.zeros((len(layers), len(parts) * rank, product.size_in), self.dtype)
        b = np.zeros((len(layers), rank, sum(parts.values())), self.dtype)
        ranks = np.zeros((len(layers), len(parts)), np.int32)
        for at, layer in enumerate(layers):
            column = 0
            for part, (name, size) in enumerate(parts.items()):
                own = factors.get((layer, name))
                if own is not None:
                    ranks[at, part] = len(own.b)
                    a[at, part * rank : part * rank + len(own.b)] = own.a
                    b[at, : len(own.b), column : column + size] = own.b
                column += size
        return a, b, ranks


def _num_parts(products: dict[str, Product]) -> int:
    return sum(len(product.parts) for product in products.values())
