"""Prompt lookup against a plain search."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sampling import RowState
from jaxserve.speculative import NO_DRAFT, NgramProposer, ProposeInput

CONTEXT = 24
ROWS = 3
_propose = jax.jit(lambda proposer, rows, work: proposer.propose(None, None, rows, work)[1].tokens, static_argnums=0)


def propose(proposer: NgramProposer, texts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Drafts of rows with these texts; the places of a row past its text hold what a search must not find."""
    rows = RowState.zeros(ROWS, 8, CONTEXT)
    history = np.array([[*text, *text[-1:] * CONTEXT][:CONTEXT] for text in texts], np.int32)
    at = np.arange(ROWS - len(texts), ROWS)
    rows = rows.replace(
        history=rows.history.at[at].set(history), length=rows.length.at[at].set([len(text) for text in texts])
    )
    work = ProposeInput(at, np.full(len(at), True), None, None, None, None, None)
    return np.asarray(_propose(proposer, rows, work)).tolist()


def search(text: Sequence[int], proposer: NgramProposer) -> list[int]:
    """The same, written plainly: the longest match, of these the latest, and what follows, repeated as it must."""
    for size in range(proposer.longest, proposer.shortest - 1, -1):
        for end in range(len(text) - 1, size - 1, -1):
            if size < len(text) and text[end - size : end] == text[len(text) - size :]:
                return [text[end + j % (len(text) - end)] for j in range(proposer.num_drafts)]
    return [NO_DRAFT] * proposer.num_drafts


@given(
    texts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=CONTEXT), min_size=ROWS, max_size=ROWS),
    sizes=st.sampled_from([(1, 1), (3, 1), (5, 2), (4, 4)]),
)
@settings(max_examples=150, deadline=None)
def test_drafts_follow_the_best_match(texts: list[list[int]], sizes: tuple[int, int]) -> None:
    proposer = NgramProposer(4, *sizes)
    assert propose(proposer, texts) == [search(text, proposer) for text in texts]


def test_a_longer_match_beats_a_later_one_and_a_later_one_an_earlier() -> None:
    proposer = NgramProposer(2, longest=2, shortest=1)
    assert propose(proposer, [[1, 2, 5, 6, 3, 2, 7, 1, 2]]) == [[5, 6]]
    assert propose(proposer, [[1, 2, 5, 1, 2, 6, 1, 2]]) == [[6, 1]]


def test_a_text_that_repeats_itself_is_taken_to_go_on_so() -> None:
    assert propose(NgramProposer(5, 3, 2), [[9, 1, 2, 1, 2]]) == [[1, 2, 1, 2, 1]]
