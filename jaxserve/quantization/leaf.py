"""The leaf of a packed matrix: what is multiplied, by whom, and the dtype that activations have beside it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import numpy as np
from flax import struct

from pallas_kernels.packed_matmul import PackedWeight, packed_matmul, take_columns

__all__ = ["Leaf", "PackedLeaf", "describe", "has_quantised"]


@struct.dataclass
class PackedLeaf:
    """A packed weight [I, O]. A table of vectors [V, E] is one with a column per token, [E, V].

    Attributes:
        weight: the values.
        backend: who computes products with it (see ``pallas_kernels.packed_matmul.select_backend``).
        dtype: of the vectors that ``take`` gives: that of the model's activations, however the values are stored.
        activation_bits: 8 if products with quantised values round the other factor too, else 16.
    """

    weight: PackedWeight
    backend: str = struct.field(pytree_node=False)
    dtype: np.dtype[Any] = struct.field(pytree_node=False)
    activation_bits: int = struct.field(pytree_node=False, default=16)

    def matmul(self, x: jax.Array) -> jax.Array:
        """x [T, I] -> [T, O] float32."""
        return packed_matmul(x, self.weight, activation_bits=self.activation_bits, backend=self.backend)

    def take(self, columns: jax.Array) -> jax.Array:
        """Columns [T] -> [T, I] in ``dtype``."""
        return take_columns(self.weight, columns).astype(self.dtype)

    @property
    def kind(self) -> str:
        """How a value is stored: a float's name, int8 or int4."""
        name = self.weight.data.dtype.name
        return "int4" if name == "uint32" else name


Leaf = jax.Array | PackedLeaf


def has_quantised(params: Any) -> bool:
    """Whether a tree of leaves holds any that are no floats."""
    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, PackedLeaf))
    return any(isinstance(leaf, PackedLeaf) and leaf.weight.scale is not None for leaf in leaves)


def describe(params: Any) -> str:
    """What a tree of leaves holds, for the log: bytes in memory, and the number of leaves of each kind."""
    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, PackedLeaf))
    kinds = Counter(
        f"packed {leaf.kind} ({leaf.backend} products)" if isinstance(leaf, PackedLeaf) else leaf.dtype.name
        for leaf in leaves
    )
    num_bytes = sum(array.nbytes for array in jax.tree.leaves(params))
    return f"{num_bytes / 2**20:.1f} MiB: " + ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
