"""Prompt lookup: what followed the last time that the row's newest tokens stood in its text.

Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding. No model, hence nearly free; right where a text
repeats itself: quotations, code, summaries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax

from jaxserve.models.decoder import DecoderInput
from jaxserve.sampling import RowState
from jaxserve.speculative.drafts import Proposal
from jaxserve.speculative.lookup import find_match, follow, newest_tokens
from jaxserve.speculative.proposer import ProposeInput

__all__ = ["NgramProposer"]


@dataclass(frozen=True)
class NgramProposer:
    """The longest match of the newest tokens with an earlier place of the row's text, of equal ones the latest.

    Attributes:
        num_drafts: K.
        longest, shortest: most and fewest tokens that must match.
    """

    num_drafts: int
    longest: int
    shortest: int
    is_tree: ClassVar[bool] = False
    has_cache: ClassVar[bool] = False
    lookahead: ClassVar[int] = 0
    taps: ClassVar[None] = None

    @property
    def max_depth(self) -> int:
        """K."""
        return self.num_drafts

    def initial(self, num_rows: int, num_blocks: int, block_size: int) -> None:
        """Nothing but the history of the rows."""

    def start(self, state: None, rows: RowState, row: jax.Array, known: jax.Array) -> None:
        """The history of the rows is kept anyway."""

    def copy(self, state: None, source: jax.Array, target: jax.Array) -> None:
        """There are no blocks."""

    def observe(self, params: None, state: None, rows: jax.Array, step: DecoderInput, states: None) -> None:
        """The history of the rows is kept anyway."""

    def propose(self, params: None, state: None, rows: RowState, work: ProposeInput) -> tuple[None, Proposal]:
        """Chains of K drafts; none where nothing matches.

        A match near the end has fewer than K tokens behind it: the text is taken to repeat from there.
        """
        history, length = rows.history[work.at], rows.length[work.at]
        newest = newest_tokens(history, length, self.longest)
        match = find_match(history, newest, length - 1, self.shortest)  # that ends before the newest token
        return None, Proposal(follow(history, match, length, self.num_drafts))
