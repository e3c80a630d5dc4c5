"""Prompt lookup: what followed the last time that the row's newest tokens stood in its text.

Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding. No model, hence nearly free; right where a text
repeats itself: quotations, code, summaries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxserve.sampling import RowState
from jaxserve.speculative.drafts import Proposal
from jaxserve.speculative.lookup import find_match, follow, newest_tokens
from jaxserve.speculative.proposer import Cacheless, ProposeInput

__all__ = ["NgramProposer"]


@dataclass(frozen=True)
class NgramProposer(Cacheless):
    """The longest match of the newest tokens with an earlier place of the row's text, of equal ones the latest.

    Attributes:
        num_drafts: K.
        longest, shortest: most and fewest tokens that must match.
    """

    num_drafts: int
    longest: int
    shortest: int
    is_tree: ClassVar[bool] = False

    @property
    def max_depth(self) -> int:
        """K."""
        return self.num_drafts

    def propose(self, params: None, state: None, rows: RowState, work: ProposeInput) -> tuple[None, Proposal]:
        """Chains of K drafts; none where nothing matches.

        A match near the end has fewer than K tokens behind it: the text is taken to repeat from there.
        """
        history, length = rows.history[work.at], rows.length[work.at]
        newest = newest_tokens(history, length, self.longest)
        match = find_match(history, newest, length - 1, self.shortest)  # that ends before the newest token
        return None, Proposal(follow(history, match, length, self.num_drafts))
