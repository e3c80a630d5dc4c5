"""Constraints against an oracle that judges every token of a small vocabulary from the whole output."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.errors import RequestError
from jaxserve.plan import NO_DRAFTS
from jaxserve.sampling_params import SamplingParams
from jaxserve.structured import Constraint, make_constraint, step_mask

VOCAB = 37
token_ids = st.integers(0, VOCAB - 1)
few_ids = st.integers(0, 3)  # so few that sequences repeat and bad words do complete


def legal(constraint: Constraint) -> set[int]:
    mask = step_mask([(constraint, 0, NO_DRAFTS)], VOCAB)
    assert mask is not None
    flags = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert not flags[VOCAB:].any()
    return set(np.flatnonzero(flags).tolist())


def oracle(output: list[int], params: SamplingParams, stops: set[int], words: list[list[int]]) -> set[int]:
    """Legal next tokens, each judged by the output that it would make."""

    def judge(token: int) -> bool:
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            return False
        if len(output) < params.min_tokens and token in stops:
            return False
        text = [*output, token]
        return not any(text[-len(word) :] == word for word in words)

    return {token for token in range(VOCAB) if judge(token)}


@given(
    allowed=st.none() | st.sets(st.integers(0, 5), min_size=2).map(tuple),
    min_tokens=st.integers(0, 6),
    stops=st.sets(token_ids, max_size=3),
    words=st.lists(st.lists(few_ids, min_size=1, max_size=4), max_size=5),
    output=st.lists(few_ids | token_ids, max_size=12),
    splits=st.lists(st.integers(0, 3), min_size=12, max_size=12),
    undo=st.integers(0, 12),
)
def test_legal_tokens_are_those_of_the_oracle(
    allowed: tuple[int, ...] | None,
    min_tokens: int,
    stops: set[int],
    words: list[list[int]],
    output: list[int],
    splits: list[int],
    undo: int,
) -> None:
    params = SamplingParams(allowed_token_ids=allowed, min_tokens=min_tokens)
    try:
        constraint = make_constraint(params, vocab_size=VOCAB, stop_ids=frozenset(stops), bad_word_ids=words)
    except RequestError:
        assert not oracle([], params, stops, words)
        return
    assert oracle([], params, stops, words)
    if constraint is None:
        assert oracle(output, params, stops, words) == set(range(VOCAB))
        return

    def check(seen: list[int]) -> None:
        expected = oracle(seen, params, stops, words) or stops or set(allowed or range(VOCAB))
        assert legal(constraint) == expected

    done = 0
    check([])
    for size in splits:  # several tokens at once, as with accepted drafts, or none
        constraint.advance(tuple(output[done : done + size]))
        done = min(len(output), done + size)
        check(output[:done])
    undo = min(undo, done)
    constraint.rollback(undo)
    check(output[: done - undo])
    constraint.advance(tuple(output[done - undo :]))
    check(output)


@pytest.mark.parametrize(
    "params",
    [SamplingParams(), SamplingParams(min_tokens=3), SamplingParams(stop_token_ids=(4,), ignore_eos=True)],
)
def test_parameters_that_forbid_nothing_need_no_constraint(params: SamplingParams) -> None:
    assert make_constraint(params, vocab_size=VOCAB, stop_ids=frozenset(), bad_word_ids=[]) is None


def test_stop_ids_outside_the_vocabulary_do_not_matter() -> None:
    params = SamplingParams(min_tokens=3)
    assert make_constraint(params, vocab_size=VOCAB, stop_ids=frozenset({VOCAB}), bad_word_ids=[]) is None


def test_a_dead_end_ends_the_output() -> None:
    params = SamplingParams(allowed_token_ids=(5, 6), min_tokens=10)
    constraint = make_constraint(params, vocab_size=VOCAB, stop_ids=frozenset({2}), bad_word_ids=[[5, 5], [5, 6]])
    assert constraint is not None
    assert legal(constraint) == {5, 6}
    constraint.advance((6, 5))
    assert legal(constraint) == {2}


def test_a_dead_end_without_stop_ids_lets_the_bad_word_pass() -> None:
    params = SamplingParams(allowed_token_ids=(5, 6))
    constraint = make_constraint(params, vocab_size=VOCAB, stop_ids=frozenset(), bad_word_ids=[[5, 5], [5, 6]])
    assert constraint is not None
    constraint.advance((5,))
    assert legal(constraint) == {5, 6}


@pytest.mark.parametrize(
    ("params", "words", "param", "message"),
    [
        (SamplingParams(allowed_token_ids=(1, VOCAB)), [], "allowed_token_ids", "id 37 is outside .* .0 to 36"),
        (SamplingParams(allowed_token_ids=(-1,)), [], "allowed_token_ids", "id -1 is outside"),
        (SamplingParams(), [[1], []], "bad_words", "no tokens"),
        (SamplingParams(), [[1, VOCAB]], "bad_words", "id 37 is outside"),
        (SamplingParams(allowed_token_ids=(4, 7)), [[7], [4]], "bad_words", "every token of allowed_token_ids"),
        (SamplingParams(), [[t] for t in range(VOCAB)], "bad_words", "every token of the vocabulary"),
        (SamplingParams(allowed_token_ids=(2,), min_tokens=1), [], "min_tokens", "min_tokens is 1"),
        (SamplingParams(allowed_token_ids=(2, 4), min_tokens=1), [[4]], "min_tokens", "min_tokens is 1"),
    ],
)
def test_contradictions_are_refused(params: SamplingParams, words: list[list[int]], param: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        make_constraint(params, vocab_size=VOCAB, stop_ids=frozenset({2}), bad_word_ids=words)
    assert caught.value.param == param
