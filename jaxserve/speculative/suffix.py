"""Lookup in the row's own text and in what was generated before, for whomever.

The idea of suffix decoding (Oliaro et al. 2024, arXiv:2411.04975): requests resemble each other, so what an answer says
next often stands in an earlier answer. The paper keeps suffix trees on the host; here the corpus is a ring of tokens on
the device, and a search reads all of it, which costs what comparing a few ten thousand integers costs, and no copies to
the host.

A text enters the corpus when its row is given to another request: then it is whole and lies in one piece, which tokens
appended as they come would not. Rows are given out again in the reverse order of their release, so the newest texts
come first. The last tokens of the prompt go with the output, so that its beginning can be found. A text stands between
two entries that are no token, so no match and no draft leaves it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from jaxserve.sampling import RowState
from jaxserve.speculative.drafts import NO_DRAFT, Proposal
from jaxserve.speculative.lookup import find_match, follow, newest_tokens
from jaxserve.speculative.proposer import Cacheless, ProposeInput

__all__ = ["Corpus", "SuffixProposer"]


@struct.dataclass
class Corpus:
    """A ring of texts.

    Attributes:
        tokens: [N] int32, NO_DRAFT before and behind each text, and where there is none yet.
        end: [] int32, place of the NO_DRAFT behind the newest text.
        known: [X] int32, how many tokens of each row are not its request's to give, see ``Proposer.start``.
    """

    tokens: jax.Array
    end: jax.Array
    known: jax.Array

    def in_order(self) -> jax.Array:
        """The texts [N], the newest last."""
        return jnp.roll(self.tokens, -1 - self.end)

    def append(self, text: jax.Array, start: jax.Array, stop: jax.Array) -> Corpus:
        """Add tokens start .. stop - 1 of text [C] (the newest N - 1 of them), if there are any."""
        size = self.tokens.shape[0]
        start = jnp.maximum(start, stop - (size - 1))
        count = jnp.maximum(stop - start, 0)
        at = jnp.arange(min(text.shape[0], size - 1), dtype=jnp.int32)
        piece = text[jnp.clip(start + at, 0, text.shape[0] - 1)]
        # Places out of range are dropped; distinct in range, as there are fewer than N.
        tokens = self.tokens.at[jnp.where(at < count, (self.end + 1 + at) % size, size)].set(piece, mode="drop")
        end = jnp.where(count > 0, (self.end + 1 + count) % size, self.end)
        return Corpus(tokens.at[end].set(NO_DRAFT), end, self.known)


@dataclass(frozen=True)
class SuffixProposer(Cacheless):
    """The longest match of the newest tokens: of equal ones that in the row's own text, then the latest.

    Attributes:
        num_drafts: K.
        longest, shortest: most and fewest tokens that must match.
        corpus_size: N, tokens of earlier texts that are kept.
    """

    num_drafts: int
    longest: int
    shortest: int
    corpus_size: int
    is_tree: ClassVar[bool] = False

    @property
    def max_depth(self) -> int:
        """K."""
        return self.num_drafts

    def initial(self, num_rows: int, num_blocks: int, block_size: int) -> Corpus:
        """An empty corpus."""
        nothing = jnp.full(self.corpus_size, NO_DRAFT, jnp.int32)
        return Corpus(nothing, jnp.int32(self.corpus_size - 1), jnp.zeros(num_rows + 1, jnp.int32))

    def start(self, state: Corpus, rows: RowState, row: jax.Array, known: jax.Array) -> Corpus:
        """Take over what the row's last request has generated."""
        before, length = state.known[row], jnp.minimum(rows.length[row], rows.history.shape[1])
        # Nothing that was generated is nothing to take over.
        begin = jnp.where(length > before, jnp.maximum(before - self.longest, 0), length)
        corpus = state.append(rows.history[row], begin, length)
        return replace(corpus, known=state.known.at[row].set(known))

    def propose(self, params: None, state: Corpus, rows: RowState, work: ProposeInput) -> tuple[Corpus, Proposal]:
        """Chains of K drafts; none where nothing matches."""
        history, length, corpus = rows.history[work.at], rows.length[work.at], state.in_order()[None]
        newest = newest_tokens(history, length, self.longest)
        own = find_match(history, newest, length - 1, self.shortest)
        others = find_match(corpus, newest, self.corpus_size, self.shortest)
        drafts = jnp.where(
            (own.size >= others.size)[:, None],
            follow(history, own, length, self.num_drafts),
            follow(corpus, others, self.corpus_size, self.num_drafts),
        )
        return state, Proposal(drafts)
