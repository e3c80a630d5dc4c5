"""The adapters of one product in all layers: what a bank holds of them.

Several projections may stand side by side in one base matrix (q, k and v): the *parts* of the product. They have the
same input and a first factor each, so the first factors stand one after the other, and a part's columns of the second
factor meet the ranks of its own first one only. Nothing is stored for the blocks that would be zero.

Letters: n slots, L layers, P parts, R the largest rank, I inputs, O columns of all parts.
"""

from __future__ import annotations

import jax
from flax import struct

__all__ = ["LoraWeights"]


@struct.dataclass
class LoraWeights:
    """Adapters by slot; slot s, counted from 1, lies at index s - 1, as slot 0 is none.

    Attributes:
        a: [n, L, P * R, I] the first factors. A row is a rank, as in PEFT's files: one that is not used is not read.
        b: [n, L, R, O] the second factors, scales included.
        ranks: [n, L, P] int32, how many ranks a part uses, 0 where the adapter does not change it. All others are 0 in
            ``a`` and ``b``; what looks at ``ranks`` need not read them.
        parts: columns of each part.
    """

    a: jax.Array
    b: jax.Array
    ranks: jax.Array
    parts: tuple[int, ...] = struct.field(pytree_node=False)

    @property
    def rank(self) -> int:
        """R."""
        return int(self.b.shape[2])

    def check(self, x: jax.Array) -> None:
        """ValueError: shapes do not belong together, or not to x [T, I]."""
        n, layers, ranks, size_in = self.a.shape
        shapes = ((n, layers, self.rank, sum(self.parts)), (n, layers, len(self.parts)), len(self.parts) * self.rank)
        if (self.b.shape, self.ranks.shape, ranks) != shapes or x.shape[1:] != (size_in,):
            raise ValueError(
                f"x {x.shape}, a {self.a.shape}, b {self.b.shape}, ranks {self.ranks.shape} and parts {self.parts} do "
                "not belong together"
            )
