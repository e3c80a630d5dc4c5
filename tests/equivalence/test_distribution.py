"""Sampled tokens follow the model's distribution, whoever guesses: token for token as without drafts, and by count.

A further method is one more entry of ``METHODS``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from jaxserve.sampling_params import SamplingParams
from jaxserve.speculative import MedusaProposer, Proposer
from tests.equivalence.harness import MODEL, Ask, Comparison, build, run, token_probabilities
from tests.equivalence.test_eagle import CHAINS
from tests.equivalence.test_eagle import TREE as EAGLE_TREE
from tests.equivalence.test_medusa import TREE
from tests.equivalence.test_speculation import ITSELF, LOOP, NGRAM
from tests.equivalence.test_suffix import QUESTION, SMALL, SUFFIX

DRAWS = 300
BIASED = SamplingParams(temperature=0.9, max_tokens=6, logit_bias={7: 4.0, 8: 7.0, 9: 7.0, 10: 4.0})
"""A few tokens of like chances."""

FILTERED = SamplingParams(temperature=1.5, max_tokens=6, top_k=4)
"""The same without a bias, of which a draft model does not know."""


@dataclass(frozen=True)
class Method:
    """A proposer, after which prompt and parameters it guesses right now and then, and an engine's sizes."""

    proposer: Proposer
    prompt: tuple[int, ...] = LOOP
    sizes: dict[str, Any] = field(default_factory=dict)
    params: SamplingParams = BIASED


METHODS = {
    "ngram": Method(NGRAM, params=replace(BIASED, logit_bias={7: 4.0, 8: 7.0, 9: 5.0, 10: 6.0})),
    "suffix": Method(SUFFIX, QUESTION.prompt, SMALL),
    "draft model": Method(ITSELF, params=FILTERED),
    "medusa chain": Method(MedusaProposer(((0,), (0, 0))), QUESTION.prompt, SMALL),
    "medusa tree": Method(TREE, QUESTION.prompt, SMALL),
    "eagle chain": Method(CHAINS["EAGLE"], QUESTION.prompt, SMALL),
    "eagle tree": Method(EAGLE_TREE, QUESTION.prompt, SMALL),
}


def asks(method: Method) -> dict[str, Ask]:
    return {f"r{seed}": Ask(method.prompt, method.params, seed=seed * 7919) for seed in range(DRAWS)}


def third_token(method: Method) -> np.ndarray[Any, np.dtype[np.float64]]:
    """How often each token is expected in the third place: what the model says, over all likely beginnings."""
    ask, expected = Ask(method.prompt, method.params), np.zeros(MODEL.vocab_size)
    first = token_probabilities(ask, ())
    for a in np.flatnonzero(first > 1e-3):
        second = token_probabilities(ask, (int(a),))
        for b in np.flatnonzero(first[a] * second > 1e-3):
            expected += first[a] * second[b] * token_probabilities(ask, (int(a), int(b)))
    return expected * DRAWS / expected.sum()


@pytest.mark.parametrize("name", METHODS)
def test_sampled_tokens_follow_the_model_s_distribution(name: str) -> None:
    method = METHODS[name]
    engine, plain = build(proposer=method.proposer, **method.sizes), build(**method.sizes)
    got, expected = run(engine, asks(method)), run(plain, asks(method))
    for ask_name, ask in asks(method).items():
        Comparison().same(ask, 0, got[f"{ask_name}.0"], expected[f"{ask_name}.0"])
    stats = engine.stats().speculation
    assert DRAWS / 10 < stats.num_accepted_tokens < stats.num_draft_tokens
    wanted = third_token(method)
    seen = np.bincount([tokens[2] for tokens in got.values()], minlength=MODEL.vocab_size)
    likely = wanted > 5
    freedom = int(likely.sum()) - 1
    assert freedom >= 2
    chi_square = ((seen - wanted) ** 2 / np.maximum(wanted, 1e-9))[likely].sum()
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)
