"""Drafts as trees: the same tokens, although right drafts are scattered among wrong ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler import AdaptiveSpeculation
from jaxserve.speculative import DraftModelProposer, NgramProposer
from tests.equivalence.harness import BACKEND, MODEL, Ask, Comparison, build, run
from tests.equivalence.test_speculation import ASKS, LOOP
from tests.equivalence.thicket import Thicket

SHALLOW = replace(MODEL, num_layers=1, windows=(24,), rope_layers=(True,))
"""For reference attention, whose programs take long to compile."""

NGRAM = Thicket(NgramProposer(num_drafts=4, longest=3, shortest=1), siblings=2)
ITSELF = Thicket(DraftModelProposer(num_drafts=2, config=MODEL, dtype="float32", backend=BACKEND), siblings=3)


@pytest.mark.parametrize(
    "way",
    [{}, {"overlap": False}, {"backend": "reference", "model": SHALLOW, "max_rows": 1, "max_tokens": 9, "exact": True}],
    ids=["overlapped", "not overlapped", "reference attention"],
)
def test_trees_change_no_token(way: dict[str, Any]) -> None:
    plain, drafted = build(**way), build(proposer=NGRAM, **way)
    expected, got = run(plain, ASKS), run(drafted, ASKS)
    for name, ask in ASKS.items():
        for i in range(ask.params.n):
            Comparison(model=way.get("model", MODEL)).same(ask, i, got[f"{name}.{i}"], expected[f"{name}.{i}"])
    assert drafted.stats().speculation.accepted_by_position[1] > 0


@pytest.mark.parametrize(
    ("way", "least"),
    [({}, 0.9), ({"overlap": False}, 0.9), ({"num_blocks": 40}, 0.6), ({"prefix": False}, 0.9)],
    ids=str,
)
def test_what_is_hidden_in_a_tree_is_found(way: dict[str, Any], least: float) -> None:
    """A model that drafts for itself is right, but for rounding, where its KV and that of the tree are."""
    asks = {name: ask for name, ask in ASKS.items() if name in ("greedy", "sampled")}
    asks |= {f"more{i}": replace(asks["sampled"], prompt=LOOP[i:] + LOOP[:20], seed=50 + i) for i in range(4)}
    plain, engine = build(), build(proposer=ITSELF, **way)
    expected = run(plain, asks)
    got = run(engine, asks)
    if "num_blocks" not in way:
        assert engine.stats().steps_total < 0.8 * plain.stats().steps_total
    for each in (got, run(engine, asks)):  # prompts are computed, then cached
        for name, ask in asks.items():
            Comparison().same(ask, 0, each[f"{name}.0"], expected[f"{name}.0"])
    stats = engine.stats().speculation
    assert stats.num_accepted_tokens > least * stats.num_draft_tokens / ITSELF.siblings
    assert (engine.stats().preemptions_total > 0) == ("num_blocks" in way)


def test_an_answer_continues_from_blocks_that_a_tree_has_filled() -> None:
    first = Ask(LOOP[:9], SamplingParams(temperature=0, max_tokens=40))
    engine, plain = build(proposer=ITSELF), build(prefix=False)
    answer = run(engine, {"a": first})["a.0"]
    hits = engine.stats().prefix_hits_total
    then = Ask((*LOOP[:9], *answer[:30], 5, 6), SamplingParams(temperature=0.8, max_tokens=30), seed=8)
    Comparison().same(then, 0, run(engine, {"b": then})["b.0"], run(plain, {"b": then})["b.0"])
    assert engine.stats().prefix_hits_total - hits >= 32
    assert engine.stats().speculation.num_accepted_tokens > 20


def test_an_adaptive_number_of_nodes_changes_no_token() -> None:
    engine = build(proposer=NGRAM)
    policy = AdaptiveSpeculation(
        NGRAM.num_drafts, pad=lambda tokens, rows: tokens, max_tokens=10**6, max_depth=NGRAM.max_depth
    )
    for size in range(1, 100):
        policy.note_step(size, 1 + 0.01 * size, proposes=True)
    policy.note_step = lambda num_tokens, seconds, *, proposes: None  # type: ignore[method-assign]
    engine.scheduler.speculation = policy
    expected, got = run(build(), ASKS), run(engine, ASKS)
    for name, ask in ASKS.items():
        for i in range(ask.params.n):
            Comparison().same(ask, i, got[f"{name}.{i}"], expected[f"{name}.{i}"])
    assert policy.stats.num_accepted_tokens > 0
