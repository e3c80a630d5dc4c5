"""The drafts of all rows, on the device.

A row's drafts are nodes of a tree. Node 0 is its newest token, node j its j-th draft; a node's parent comes before it,
so that any first few nodes are a tree as well. A chain is the tree in which every node follows the one before: nobody
writes down its parents, and nothing is computed of them.

Letters: X rows of the device state, K most drafts of a row, Q = 1 + K nodes, W = ceil(Q / 32) words.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

__all__ = ["NO_DRAFT", "DraftState", "Proposal", "lineage"]

NO_DRAFT = -1
"""Stands where there is no draft. It is no token, so nothing that is sampled is equal to it."""


class Proposal(NamedTuple):
    """Drafts of R rows, the most promising first.

    Attributes:
        tokens: [R, K] int32 token ids, NO_DRAFT past a row's last. Drafts that follow the same node are distinct.
        parents: [R, K] int32, the node that each draft follows, one before its own; None for chains.
    """

    tokens: jax.Array
    parents: jax.Array | None = None


@struct.dataclass
class DraftState:
    """Drafts of every row.

    Attributes:
        tokens: [X, K] int32 token ids, NO_DRAFT past a row's last.
        parents: [X, K] int32, the node that each draft follows; None if all rows have chains.
        lineage: [X, Q, W] uint32, see ``lineage``; None if all rows have chains.
    """

    tokens: jax.Array
    parents: jax.Array | None = None
    lineage: jax.Array | None = None

    @classmethod
    def empty(cls, num_rows: int, num_drafts: int, *, is_tree: bool = False) -> DraftState:
        """No drafts for num_rows rows and the dummy; ``is_tree`` says whether they may ever have trees."""
        tokens = jnp.full((num_rows + 1, num_drafts), NO_DRAFT, jnp.int32)
        if not is_tree:
            return cls(tokens)
        parents = jnp.zeros_like(tokens)
        return cls(tokens, parents, lineage(parents))

    @property
    def width(self) -> int:
        """K."""
        return self.tokens.shape[1]

    def put(self, rows: jax.Array, proposal: Proposal) -> DraftState:
        """Replace the drafts of rows [R]."""
        tokens = self.tokens.at[rows].set(proposal.tokens)
        if self.parents is None or self.lineage is None or proposal.parents is None:
            return DraftState(tokens)
        return DraftState(
            tokens,
            self.parents.at[rows].set(proposal.parents),
            self.lineage.at[rows].set(lineage(proposal.parents)),
        )

    def drop(self, row: jax.Array) -> DraftState:
        """Without the drafts of one row; what is left of its tree has no tokens."""
        return DraftState(self.tokens.at[row].set(NO_DRAFT), self.parents, self.lineage)

    def token(self, rows: jax.Array, nodes: jax.Array) -> jax.Array:
        """Token of node nodes [P] of rows [P]; NO_DRAFT for a row's newest token and past its drafts."""
        if self.width == 0:
            return jnp.full(rows.shape, NO_DRAFT, jnp.int32)
        return jnp.where(nodes > 0, self.tokens[rows, jnp.maximum(nodes - 1, 0)], NO_DRAFT)

    def parent(self, rows: jax.Array, nodes: jax.Array) -> jax.Array:
        """The node that node nodes [P] of rows [P] follows; 0 for a row's newest token."""
        if self.parents is None:
            return jnp.maximum(nodes - 1, 0)
        return jnp.where(nodes > 0, self.parents[rows, jnp.maximum(nodes - 1, 0)], 0)

    def depth(self, rows: jax.Array, nodes: jax.Array) -> jax.Array:
        """How many drafts a path to node nodes [P] of rows [P] has."""
        if self.lineage is None:
            return nodes
        words = self.lineage[rows, jnp.clip(nodes, 0, self.width)]
        return jax.lax.population_count(words).sum(-1).astype(jnp.int32) - 1

    def context(self, rows: jax.Array, nodes: jax.Array) -> jax.Array:
        """The drafts [P, K] on the path to node nodes [P] of rows [P], NO_DRAFT in the place of others."""
        node = jnp.arange(1, 1 + self.width, dtype=jnp.int32)
        if self.lineage is None:
            on_path = node <= nodes[:, None]
        else:
            on_path = (self.lineage[rows, nodes][:, node // 32] >> (node % 32).astype(jnp.uint32) & 1) == 1
        return jnp.where(on_path, self.tokens[rows], NO_DRAFT)


def lineage(parents: jax.Array) -> jax.Array:
    """Ancestors of each node, and the node itself, as bits [R, Q, W] uint32 from parents [R, K].

    Node j is bit j % 32 of word j // 32.
    """
    num_nodes = parents.shape[1] + 1
    node = jnp.arange(num_nodes, dtype=jnp.int32)
    word = jnp.arange(-(-num_nodes // 32), dtype=jnp.int32)
    own = jnp.where(word == node[:, None] // 32, jnp.uint32(1) << (node[:, None] % 32).astype(jnp.uint32), 0)
    bits = jnp.broadcast_to(own.astype(jnp.uint32), (parents.shape[0], *own.shape))
    ancestor = jnp.pad(parents, ((0, 0), (1, 0)))
    for _ in range(parents.shape[1].bit_length()):  # twice as far up each time
        bits |= jnp.take_along_axis(bits, ancestor[..., None], axis=1)
        ancestor = jnp.take_along_axis(ancestor, ancestor, axis=1)
    return bits
