"""Prompt lookup: what followed the last time that the row's newest tokens stood in its text.

Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding. No model, hence nearly free; right where a text
repeats itself: quotations, code, summaries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxserve.models.decoder import DecoderInput
from jaxserve.sampling import RowState
from jaxserve.speculative.drafts import NO_DRAFT, Proposal
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

    def copy(self, state: None, source: jax.Array, target: jax.Array) -> None:
        """There are no blocks."""

    def observe(self, params: None, state: None, rows: jax.Array, step: DecoderInput, states: None) -> None:
        """The history of the rows is kept anyway."""

    def propose(self, params: None, state: None, rows: RowState, work: ProposeInput) -> tuple[None, Proposal]:
        """Chains of K drafts; none where nothing matches.

        A match near the end has fewer than K tokens behind it: the text is taken to repeat from there.
        """
        history, length = rows.history[work.at], rows.length[work.at]
        end = _match_end(history, length, self.longest, self.shortest)
        distance = jnp.maximum(length - end, 1)
        source = end[:, None] + jnp.arange(self.num_drafts) % distance[:, None]
        drafts = jnp.take_along_axis(history, jnp.clip(source, 0, history.shape[1] - 1), axis=1)
        return None, Proposal(jnp.where(end[:, None] > 0, drafts, NO_DRAFT))


def _match_end(history: jax.Array, length: jax.Array, longest: int, shortest: int) -> jax.Array:
    """Position [R] after the best match in history [R, C] of length [R], 0 if there is none."""
    num_places = history.shape[1]
    at = jnp.arange(num_places)
    run = jnp.zeros(history.shape, jnp.int32)
    alike = at < length[:, None] - 1  # of matches that end before the newest token
    for back in range(longest):
        wanted = jnp.take_along_axis(history, jnp.maximum(length - 1 - back, 0)[:, None], axis=1)
        shifted = history if back == 0 else jnp.pad(history, ((0, 0), (back, 0)), constant_values=NO_DRAFT)[:, :-back]
        alike &= (shifted == wanted) & (length[:, None] > back)
        run += alike
    score = jnp.where(run >= shortest, run * num_places + at, -1).max(1)
    return jnp.where(score >= 0, score % num_places + 1, 0)
