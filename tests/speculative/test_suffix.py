"""Lookup in a row's text and in earlier answers, against a plain search in lists."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sampling import RowState
from jaxserve.speculative import NO_DRAFT, ProposeInput, SuffixProposer
from jaxserve.speculative.suffix import Corpus

CONTEXT = 12
SIZE = 20
PROPOSER = SuffixProposer(3, longest=4, shortest=2, corpus_size=SIZE)

_start = jax.jit(PROPOSER.start)
_propose = jax.jit(lambda state, rows, work: PROPOSER.propose(None, state, rows, work)[1].tokens)


def rows_with(text: Sequence[int]) -> RowState:
    """Row 0 has this text; behind it stands what must not be found."""
    rows = RowState.zeros(1, 8, CONTEXT)
    padded = np.array([*text, *[1, 2] * CONTEXT][:CONTEXT], np.int32)
    return rows.replace(history=rows.history.at[0].set(padded), length=rows.length.at[0].set(len(text)))


def remember(texts: Sequence[tuple[Sequence[int], int]]) -> Corpus:
    """The state after row 0 had these (text, tokens that it began with), one after the other."""
    state, before = PROPOSER.initial(1, 0, 1), rows_with([])
    for text, known in texts:
        state, before = _start(state, before, np.int32(0), np.int32(known)), rows_with(text)
    last: Corpus = _start(state, before, np.int32(0), np.int32(0))
    return last


def propose(state: Corpus, text: Sequence[int]) -> list[int]:
    work = ProposeInput(np.array([0]), np.array([True]), None, None, None, None, None)
    drafts: list[int] = np.asarray(_propose(state, rows_with(text), work))[0].tolist()
    return drafts


def search(texts: Sequence[tuple[Sequence[int], int]], text: Sequence[int]) -> list[int]:
    """The same, written plainly: the corpus as one list, cut to its size at the old end."""
    corpus: list[int] = []
    for earlier, known in texts:
        if len(earlier) > known:
            corpus += [NO_DRAFT, *earlier[max(known - PROPOSER.longest, 0) :]]
    corpus = [*corpus, NO_DRAFT][-SIZE:]
    for size in range(PROPOSER.longest, PROPOSER.shortest - 1, -1):
        newest = list(text[-size:])
        for place, stop in ((list(text), len(text) - 1), (corpus, len(corpus))):
            for end in range(stop, size - 1, -1):
                if size <= len(text) and place[end - size : end] == newest:
                    cyclic = [place[end + j % (len(place) - end)] for j in range(PROPOSER.num_drafts)]
                    cut = cyclic.index(NO_DRAFT) if NO_DRAFT in cyclic else len(cyclic)
                    return cyclic[:cut] + [NO_DRAFT] * (len(cyclic) - cut)
    return [NO_DRAFT] * PROPOSER.num_drafts


@given(
    texts=st.lists(
        st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=CONTEXT), st.integers(0, CONTEXT)), max_size=8
    ),
    text=st.lists(st.integers(0, 2), min_size=1, max_size=CONTEXT),
)
@settings(max_examples=80, deadline=None)
def test_drafts_follow_the_best_match_of_all_texts(texts: list[tuple[list[int], int]], text: list[int]) -> None:
    assert propose(remember(texts), text) == search(texts, text)


def test_the_own_text_comes_first_unless_another_matches_longer() -> None:
    state = remember([([7, 1, 2, 3, 4, 5, 6], 1)])
    assert propose(state, [1, 2, 9, 1, 2]) == [9, 1, 2]
    assert propose(state, [2, 3, 9, 1, 2, 3]) == [4, 5, 6]


def test_no_draft_leaves_its_text() -> None:
    state = remember([([1, 2, 3], 0), ([4, 5, 6], 0)])
    assert propose(state, [1, 2]) == [3, NO_DRAFT, NO_DRAFT]
    assert propose(state, [3, 4]) == [NO_DRAFT] * 3


def test_what_is_private_is_not_remembered() -> None:
    assert propose(remember([([1, 2, 3], 2**31 - 1)]), [1, 2]) == [NO_DRAFT] * 3


def test_a_text_longer_than_the_ring_leaves_its_end() -> None:
    tiny = SuffixProposer(2, longest=2, shortest=2, corpus_size=6)
    state = tiny.initial(1, 0, 1)
    state = tiny.start(state, rows_with(range(10, 20)), np.int32(0), np.int32(0))
    assert jnp.concatenate([state.in_order(), state.tokens[state.end][None]]).tolist() == [*range(15, 20), -1, -1]
