"""A proposer of trees whose right drafts stand anywhere among wrong ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxserve.models.decoder import DecoderInput
from jaxserve.sampling import RowState
from jaxserve.speculative import NO_DRAFT, DraftModelProposer, NgramProposer, Proposal, ProposeInput
from tests.equivalence.harness import MODEL

__all__ = ["Thicket"]


@dataclass(frozen=True)
class Thicket:
    """Hides a chain in a tree: beside each of its drafts stand wrong ones, in an order that changes."""

    chain: NgramProposer | DraftModelProposer
    siblings: int = 3
    is_tree: ClassVar[bool] = True
    taps: ClassVar[None] = None

    @property
    def has_cache(self) -> bool:
        return self.chain.has_cache

    @property
    def lookahead(self) -> int:
        return self.chain.lookahead

    @property
    def max_depth(self) -> int:
        return self.chain.num_drafts

    @property
    def num_drafts(self) -> int:
        return self.chain.num_drafts * self.siblings

    def initial(self, num_rows: int, num_blocks: int, block_size: int) -> Any:
        return self.chain.initial(num_rows, num_blocks, block_size)

    def start(self, state: Any, rows: RowState, row: jax.Array, known: jax.Array) -> Any:
        return self.chain.start(state, rows, row, known)

    def copy(self, state: Any, source: jax.Array, target: jax.Array) -> Any:
        return self.chain.copy(state, source, target)

    def observe(self, params: Any, state: Any, rows: jax.Array, step: DecoderInput, states: Any) -> Any:
        return self.chain.observe(params, state, rows, step, states)

    def propose(self, params: Any, state: Any, rows: RowState, work: ProposeInput) -> tuple[Any, Proposal]:
        state, chain = self.chain.propose(params, state, rows, work)
        depth, sibling = jnp.arange(self.max_depth), jnp.arange(self.siblings)
        right = (rows.length[work.at, None] + 2 * depth) % self.siblings  # which sibling is the chain's
        tokens = (chain.tokens[..., None] + sibling - right[..., None]) % MODEL.vocab_size
        tokens = jnp.where(chain.tokens[..., None] == NO_DRAFT, NO_DRAFT, tokens)
        parents = jnp.pad(1 + self.siblings * depth + right, ((0, 0), (1, 0)))[:, :-1]
        shape = (tokens.shape[0], self.num_drafts)
        return state, Proposal(tokens.reshape(shape), parents.repeat(self.siblings, 1).astype(jnp.int32))
