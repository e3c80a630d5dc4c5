"""Bit sets against plain Python sets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.plan import NO_DRAFTS, Drafts
from jaxserve.structured import AllowedTokens, BadWords, all_tokens, num_words, pack, step_mask


def unpack(words: np.ndarray) -> set[int]:
    """Tokens of a set, read bit by bit from the definition."""
    return {32 * i + bit for i, word in enumerate(words.tolist()) for bit in range(32) if word >> bit & 1}


@given(st.integers(1, 200).flatmap(lambda v: st.tuples(st.just(v), st.sets(st.integers(0, v - 1)))))
def test_pack_sets_exactly_the_bits_of_its_tokens(case: tuple[int, set[int]]) -> None:
    vocab_size, tokens = case
    words = pack(tokens, vocab_size)
    assert words.dtype == np.uint32
    assert words.shape == (num_words(vocab_size),)
    assert unpack(words) == tokens


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 49152])
def test_all_tokens_leaves_bits_past_the_vocabulary_clear(vocab_size: int) -> None:
    assert unpack(all_tokens(vocab_size)) == set(range(vocab_size))


@pytest.mark.parametrize("token", [-1, 40])
def test_pack_refuses_ids_outside_the_vocabulary(token: int) -> None:
    with pytest.raises(IndexError, match="from 0 to 39"):
        pack([3, token], 40)


def test_step_without_constraints_has_no_mask() -> None:
    assert step_mask([(None, 0, NO_DRAFTS), (None, 2, NO_DRAFTS)], 40) is None
    assert step_mask([], 40) is None


def test_step_mask_restricts_constrained_rows_only() -> None:
    mask = step_mask([(None, 0, NO_DRAFTS), (AllowedTokens([5, 39], 40), 0, NO_DRAFTS), (None, 0, NO_DRAFTS)], 40)
    assert mask is not None
    assert mask.dtype == np.uint32
    assert [unpack(row) for row in mask] == [set(range(40)), {5, 39}, set(range(40))]


def test_each_step_gets_an_array_of_its_own() -> None:
    constraint = AllowedTokens([5], 40)
    first, second = (step_mask([(constraint, 0, NO_DRAFTS)], 40) for _ in range(2))
    assert first is not None
    assert second is not None
    assert not np.shares_memory(first, second)


def test_places_after_drafts_are_masked_as_if_these_were_right() -> None:
    bad = BadWords([(1, 2, 3), (1, 4)], 40)
    bad.advance((1,))
    tree = Drafts(tokens=(2, 5, 3, 6), parents=(0, 0, 1, 2))
    mask = step_mask([(None, 1, NO_DRAFTS), (bad, 4, tree), (bad, 0, tree)], 40)
    assert mask is not None
    everything = set(range(40))
    forbidden = [everything - unpack(row) for row in mask]
    # Nothing follows the third draft: it is illegal after the first, so what comes after it is of no matter.
    assert forbidden == [set(), set(), {4}, {3}, set(), set(), set(), {4}]
    single = step_mask([(bad, 0, NO_DRAFTS)], 40)
    assert single is not None
    assert everything - unpack(single[0]) == {4}, "the constraint is back where it was"
