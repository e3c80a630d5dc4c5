"""What the device has of adapters: a slot for each that is in use, in arrays of a fixed shape.

A step with adapters runs over a parameter tree in which a matrix that they change is an ``Adapted`` leaf: the base
matrix and what is added to its products. So the decoder does not know of adapters, and a step without any runs over the
plain tree. All layers lie in one array per factor: an adapter's slot is filled by few copies, and few leaves are passed
to each step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxserve.lora.layout import EMBED, LM_HEAD, Layout, Piece, TablePiece
from pallas_kernels.lora_matmul import LoraPlan, LoraWeights, lora_matmul, make_plan

__all__ = ["Adapted", "Bank", "LoraInput", "adapt", "adapt_head", "put"]


@struct.dataclass
class Bank:
    """All slots.

    Attributes:
        products: those of the layers, by their name in the parameter tree.
        tables: those beside the layers, of one layer; none unless adapters may change them.
        lookup: [n, V, R] what the embedding looks up, if it is among the tables.
        backend: who computes products (see ``pallas_kernels.lora_matmul``).
    """

    products: dict[str, LoraWeights]
    tables: dict[str, LoraWeights]
    lookup: jax.Array | None
    backend: str = struct.field(pytree_node=False)

    @classmethod
    def zeros(cls, layout: Layout, num_slots: int, backend: str) -> Bank:
        """Empty slots 1 to ``num_slots``."""

        def weights(layers: int, size_in: int, parts: tuple[int, ...]) -> LoraWeights:
            a = jnp.zeros((num_slots, layers, len(parts) * layout.max_rank, size_in), layout.dtype)
            b = jnp.zeros((num_slots, layers, layout.max_rank, sum(parts)), layout.dtype)
            return LoraWeights(a, b, jnp.zeros((num_slots, layers, len(parts)), jnp.int32), parts)

        count, vocab = layout.model.num_layers, layout.model.vocab_size
        return cls(
            {name: weights(count, p.size_in, tuple(p.parts.values())) for name, p in layout.products.items()},
            {name: weights(1, p.size_in, tuple(p.parts.values())) for name, p in layout.tables.items()},
            jnp.zeros((num_slots, vocab, layout.max_rank), layout.dtype) if layout.has_tables else None,
            backend,
        )

    @property
    def num_slots(self) -> int:
        """n: slots that hold an adapter each."""
        return int(next(iter(self.products.values())).a.shape[0])

    @property
    def num_bytes(self) -> int:
        """Of all slots."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))


@struct.dataclass
class LoraInput:
    """What a step with adapters takes beside the others' input.

    Attributes:
        bank: the adapters.
        slots: [R] int32, the slot of each row, or [P] of each place; 0 for the base model.
    """

    bank: Bank
    slots: Any


@struct.dataclass
class Adapted:
    """A matrix of the model, and what adapters add to its products; dispatched on in ``layers``.

    Attributes:
        base: the leaf of the model.
        weights: the adapters.
        layer: [] int32, which layer this is.
        plan: which token has which adapter.
        backend: who computes it.
        lookup: of the embedding, what is looked up.
    """

    base: Any
    weights: LoraWeights
    layer: jax.Array
    plan: LoraPlan
    backend: str = struct.field(pytree_node=False)
    lookup: jax.Array | None = None

    def added(self, x: jax.Array) -> jax.Array:
        """What is added to the products of x [T, I] -> [T, O] float32."""
        return lora_matmul(x, self.weights, self.layer, self.plan, backend=self.backend)

    def added_to_rows(self, tokens: jax.Array, dtype: Any) -> jax.Array:
        """What is added to the vectors of tokens [T] -> [T, E] float32."""
        assert self.lookup is not None
        return self.added(self.lookup[jnp.maximum(self.plan.slots - 1, 0), tokens].astype(dtype))


def adapt(params: dict[str, Any], bank: Bank, slots: jax.Array) -> dict[str, Any]:
    """The parameters of the decoder for tokens with slots [T]."""
    plan = make_plan(slots, bank.num_slots + 1)

    def layer(index: int, base: dict[str, Any]) -> dict[str, Any]:
        at = jnp.int32(index)
        own = {name: Adapted(base[name], w, at, plan, bank.backend) for name, w in bank.products.items()}
        return {**base, **own}

    adapted = {**params, "layers": [layer(i, base) for i, base in enumerate(params["layers"])]}
    if bank.lookup is not None:
        embed = Adapted(params[EMBED], bank.tables[EMBED], jnp.int32(0), plan, bank.backend, bank.lookup)
        adapted[EMBED] = embed
    return adapted


def adapt_head(params: dict[str, Any], bank: Bank, slots: jax.Array) -> dict[str, Any]:
    """The parameters that logits are made with, for places with slots [P]; of a tied model, those of the embedding."""
    if LM_HEAD not in bank.tables:
        return params
    plan, base = make_plan(slots, bank.num_slots + 1), params.get(LM_HEAD, params[EMBED])
    return {**params, LM_HEAD: Adapted(base, bank.tables[LM_HEAD], jnp.int32(0), plan, bank.backend)}


def put(bank: Bank, slot: jax.Array, piece: Piece | TablePiece) -> Bank:
    """The bank with a piece of an adapter in a slot; donate the bank, and it is written in place."""
    if isinstance(piece, TablePiece):
        tables = {name: _put(bank.tables[name], slot, 0, arrays) for name, arrays in piece.tables.items()}
        zero = jnp.int32(0)
        lookup = _written(bank.lookup, piece.lookup[None], [slot - 1, zero, zero])
        return replace(bank, tables=tables, lookup=lookup)
    given = piece.products.items()
    return replace(bank, products={name: _put(bank.products[name], slot, piece.first, each) for name, each in given})


def _put(weights: LoraWeights, slot: jax.Array, layer: Any, arrays: tuple[Any, Any, Any]) -> LoraWeights:
    a, b, ranks = arrays
    at = [slot - 1, jnp.asarray(layer, jnp.int32), jnp.int32(0), jnp.int32(0)]
    return LoraWeights(
        _written(weights.a, a[None], at),
        _written(weights.b, b[None], at),
        _written(weights.ranks, ranks[None], at[:3]),
        weights.parts,
    )


def _written(bank: Any, values: Any, at: list[jax.Array]) -> jax.Array:
    """The array with ``values`` from ``at`` on. Bits are written: of bfloat16 XLA's CPU would convert all there is."""
    bits = {2: jnp.uint16, 4: jnp.uint32}[bank.dtype.itemsize]
    written = lax.dynamic_update_slice(_as(bank, bits), _as(jnp.asarray(values), bits), at)
    return _as(written, bank.dtype)


def _as(array: jax.Array, dtype: Any) -> jax.Array:
    return lax.bitcast_convert_type(array, dtype)
