"""Typical acceptance: more drafts are kept where tokens are sampled, none where they are not, and the rest holds."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from jaxserve.sampling_params import SamplingParams
from jaxserve.speculative import TypicalAcceptance
from tests.equivalence.harness import Ask, Comparison, build, run, token_probabilities
from tests.equivalence.test_speculation import ASKS, LOOP, NGRAM, logprobs_of

RULE = TypicalAcceptance(threshold=0.05, alpha=0.2)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=30, logit_bias={7: 4.0, 8: 5.0, 9: 5.0, 10: 4.0, 11: 4.0, 12: 4.0})


def test_more_drafts_are_kept() -> None:
    asks = {f"r{seed}": Ask(LOOP, SAMPLED, seed=seed) for seed in range(8)}
    share = []
    for rule in (None, RULE):
        engine = build(proposer=NGRAM, typical=rule)
        run(engine, asks)
        stats = engine.stats().speculation
        share.append(stats.num_accepted_tokens / stats.num_draft_tokens)
    assert share[1] > 1.3 * share[0] > 0


def test_greedy_rows_stay_exact_beside_sampled_ones() -> None:
    ask = ASKS["greedy"]
    expected = run(build(), {"a": ask})["a.0"]
    got = run(build(proposer=NGRAM, typical=RULE), {"a": ask, "b": Ask(LOOP, SAMPLED)})["a.0"]
    Comparison().same(ask, 0, got, expected)


def test_constraints_hold() -> None:
    asks = {f"r{seed}": replace(ASKS["tied and sampled"], seed=seed) for seed in range(8)}
    engine = build(proposer=NGRAM, typical=RULE)
    words = {(token, other) for token in range(5, 15) for other in range(9, 30, 2)}
    for tokens in run(engine, asks).values():
        assert len(tokens) >= 8
        assert set(tokens) <= set(range(3, 40))
        assert not set(pairwise(tokens)) & words
    assert engine.stats().speculation.num_accepted_tokens > 0


def test_kept_drafts_have_their_own_logprobs() -> None:
    ask = Ask(LOOP, replace(SAMPLED, logprobs=0))
    engine = build(proposer=NGRAM, typical=RULE)
    pairs = logprobs_of(engine, ask)
    assert engine.stats().speculation.num_accepted_tokens > 5
    tokens = [token for token, _ in pairs]
    plain = replace(ask, params=SamplingParams(temperature=1.0))
    for at, (token, entry) in enumerate(pairs[:12]):
        assert entry.logprob == pytest.approx(np.log(token_probabilities(plain, tokens[:at])[token]), abs=1e-3)
