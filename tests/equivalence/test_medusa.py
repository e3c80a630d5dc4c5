"""With the drafts of Medusa heads: the same tokens, in fewer steps."""

from __future__ import annotations

from typing import Any

from jaxserve.sampling_params import SamplingParams
from jaxserve.speculative import MedusaProposer
from tests.equivalence.harness import Ask, Comparison, build, run

TREE = MedusaProposer(((0,), (1,), (0, 0), (2,), (1, 0)))

KNOWN: dict[str, Any] = {"logit_bias": dict.fromkeys(range(3, 15), 9.0)}
"""Makes the model write the tokens that the heads know, of which they guess some by chance."""

ASKS = {
    "greedy": Ask(tuple(range(20, 40)), SamplingParams(temperature=0, max_tokens=40, **KNOWN)),
    "sampled": Ask((7, 8, 9), SamplingParams(temperature=0.8, max_tokens=60, n=2, **KNOWN), seed=3),
    "penalised": Ask((3, 4), SamplingParams(temperature=0.5, frequency_penalty=0.4, max_tokens=60, **KNOWN), seed=8),
    "unbiased": Ask(tuple(range(20, 40)), SamplingParams(temperature=0.7, top_p=0.9, max_tokens=30), seed=5),
}


def test_the_heads_drafts_change_no_token() -> None:
    """On trees; chains of heads are what other chains are."""
    plain, drafted = (build(proposer=proposer, max_rows=2, max_tokens=16, exact=True) for proposer in (None, TREE))
    for name, ask in ASKS.items():
        expected, got = run(plain, {name: ask}), run(drafted, {name: ask})
        for i in range(ask.params.n):
            Comparison().same(ask, i, got[f"{name}.{i}"], expected[f"{name}.{i}"])
    assert drafted.stats().speculation.accepted_by_position[1] > 0
    assert drafted.stats().steps_total < plain.stats().steps_total


def test_a_proposer_knows_its_shape() -> None:
    assert (TREE.num_drafts, TREE.max_depth, TREE.is_tree) == (5, 2, True)
    chain = MedusaProposer(((0,), (0, 0), (0, 0, 0)))
    assert (chain.num_drafts, chain.max_depth, chain.is_tree) == (3, 3, False)
