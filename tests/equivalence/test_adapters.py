"""Adapters beside every other feature: requests get the tokens of the model with their adapter merged into the weights.

More adapters than slots, prompts in chunks, siblings, masks and preemption; and drafts of every kind, which are made by
the base model or its heads and verified with the adapter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from jaxserve.engine import Engine
from jaxserve.sampling_params import SamplingParams
from jaxserve.speculative import Proposer
from tests.equivalence import test_eagle, test_medusa, test_speculation, test_suffix
from tests.equivalence.adapted import KEYS
from tests.equivalence.harness import Ask, Comparison, build, run
from tests.equivalence.test_structured import ask as structured

LOOP = test_speculation.LOOP
SMALL: dict[str, Any] = {"max_rows": 2, "max_tokens": 8, "exact": True}
STYLE, FORMAT, PERSONA = KEYS
ASKS = {
    "base": Ask(LOOP, SamplingParams(temperature=0, max_tokens=30)),
    "greedy": Ask(LOOP, SamplingParams(temperature=0, max_tokens=30), adapter=STYLE),
    "several": Ask(LOOP[:21], SamplingParams(temperature=0.7, max_tokens=20, n=2), adapter=FORMAT, seed=4),
    "structured": replace(structured(0.8), adapter=PERSONA),
    "tied": replace(test_speculation.ASKS["tied and sampled"], adapter=STYLE),
    "likely": Ask(
        (*LOOP, 3), SamplingParams(temperature=0.9, max_tokens=30, logit_bias={7: 7.0, 8: 7.0}), adapter=PERSONA
    ),
}
DRAFTS: dict[str, Proposer | None] = {
    "none": None,
    "ngram": test_speculation.NGRAM,
    "suffix": test_suffix.SUFFIX,
    "draft model": test_speculation.ITSELF,
    "medusa tree": test_medusa.TREE,
    "eagle tree": test_eagle.TREE,
}


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    """Every ask alone, by an engine whose weights have the ask's adapter in them."""
    return {
        name: tokens
        for ask_name, ask in ASKS.items()
        for name, tokens in run(build(**SMALL, merged=ask.adapter), {ask_name: replace(ask, adapter=None)}).items()
    }


def check(engine: Engine, expected: dict[str, list[int]], asks: Mapping[str, Ask] = ASKS) -> None:
    got = run(engine, asks)
    for name, ask in asks.items():
        for i in range(ask.params.n):
            Comparison().same(ask, i, got[f"{name}.{i}"], expected[f"{name}.{i}"])


@pytest.mark.parametrize("drafts", DRAFTS)
def test_tokens_are_those_of_merged_weights(drafts: str, expected: dict[str, list[int]]) -> None:
    engine = build(proposer=DRAFTS[drafts], num_slots=2, **SMALL)
    for _ in range(2):  # prompts are computed, then cached
        check(engine, expected)
    assert engine.stats().prefix_hits_total > 0
    if drafts != "none":
        assert engine.stats().speculation.num_accepted_tokens > 0


@pytest.mark.parametrize("way", [{"num_blocks": 20}, {"overlap": False}, {"prefix": False}], ids=str)
def test_no_way_to_serve_changes_a_token(way: dict[str, Any], expected: dict[str, list[int]]) -> None:
    engine = build(proposer=DRAFTS["ngram"], num_slots=2, **SMALL, **way)
    check(engine, expected, {name: ask for name, ask in ASKS.items() if name != "structured"})  # it may grow too long
    assert (engine.stats().preemptions_total > 0) == ("num_blocks" in way)


def test_adapters_say_other_things(expected: dict[str, list[int]]) -> None:
    plain = run(build(**SMALL), {name: replace(ask, adapter=None) for name, ask in ASKS.items()})
    assert [name for name in plain if plain[name] == expected[name]] == ["base.0"]


def test_no_prefix_is_found_across_adapters() -> None:
    """Nor between one of them and the base model, whose tokens are the same."""
    engine = build(num_slots=2, **SMALL)
    for key in (*KEYS, None):
        asked = {"x": replace(ASKS["base"], adapter=key)}
        before = engine.stats().prefix_hits_total
        first = run(engine, asked)
        assert engine.stats().prefix_hits_total == before
        assert run(engine, asked) == first
        assert engine.stats().prefix_hits_total - before == len(LOOP) - 1
