"""With drafts or without: the same tokens, in fewer steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from jaxserve.engine import Engine
from jaxserve.plan import TokenLogprobs
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler import AdaptiveSpeculation, FixedSpeculation
from jaxserve.speculative import DraftModelProposer, NgramProposer
from jaxserve.structured import make_constraint
from tests.equivalence.harness import BACKEND, MODEL, Ask, Comparison, build, run

NGRAM = NgramProposer(num_drafts=4, longest=3, shortest=1)
ITSELF = DraftModelProposer(num_drafts=3, config=MODEL, dtype="float32", backend=BACKEND)
"""The model as its own draft model: every draft is right, if its KV is."""

LOOP = (7, 8, 9, 10, 11, 12) * 5
"""A prompt in which every match is followed by drafts."""


def adaptive() -> Engine:
    """An engine whose steps seem to cost nothing, so that drafts always pay."""
    engine = build(proposer=NGRAM)
    speculation = AdaptiveSpeculation(NGRAM.num_drafts, pad=lambda tokens, rows: tokens, max_tokens=10**6)
    speculation.note_step(1, 1.0, proposes=True)
    speculation.note_step = lambda num_tokens, seconds, *, proposes: None  # type: ignore[method-assign]
    engine.scheduler.speculation = speculation
    return engine


def tied() -> Any:
    """A constraint that depends on the output: words of two tokens, and no end before eight."""
    params = SamplingParams(min_tokens=8, allowed_token_ids=list(range(3, 40)))
    words = [[token, other] for token in range(5, 15) for other in range(9, 30, 2)]
    return make_constraint(params, vocab_size=MODEL.vocab_size, stop_ids=frozenset({3, 4}), bad_word_ids=words)


ASKS = {
    "greedy": Ask(LOOP, SamplingParams(temperature=0, max_tokens=40)),
    "sampled": Ask(LOOP, SamplingParams(temperature=0.7, max_tokens=40), seed=11),
    "cold": Ask(LOOP[:20], SamplingParams(temperature=0.2, top_p=0.9, max_tokens=30, n=2), seed=3),
    "penalised": Ask(
        LOOP, SamplingParams(temperature=0.5, frequency_penalty=0.3, repetition_penalty=1.2, max_tokens=30)
    ),
    "biased": Ask(LOOP, SamplingParams(temperature=0, logit_bias={7: 9.0, 8: 8.5}, max_tokens=30)),
    "tied": Ask(LOOP, SamplingParams(temperature=0, max_tokens=30), stop_ids=frozenset({3, 4}), constraint=tied),
    "tied and sampled": Ask(LOOP, SamplingParams(max_tokens=30), stop_ids=frozenset({3, 4}), constraint=tied, seed=9),
}


@pytest.mark.parametrize("overlap", [True, False])
def test_drafts_change_no_token_and_save_steps(overlap: bool) -> None:
    for name, ask in ASKS.items():
        plain, drafted = build(overlap=overlap), build(overlap=overlap, proposer=NGRAM)
        expected, got = run(plain, {name: ask}), run(drafted, {name: ask})
        for i in range(ask.params.n):
            Comparison().same(ask, i, got[f"{name}.{i}"], expected[f"{name}.{i}"])
        stats = drafted.stats().speculation
        assert stats.num_draft_tokens >= stats.num_accepted_tokens == sum(stats.accepted_by_position)
        if name in ("greedy", "biased"):
            assert stats.accepted_by_position[3] > 0
            assert drafted.stats().steps_total < plain.stats().steps_total


def test_every_draft_is_counted_for_its_request_and_for_all() -> None:
    engine = build(proposer=NGRAM)
    ended = replace(ASKS["greedy"], stop_ids=frozenset({run(build(), {"a": ASKS["greedy"]})["a.0"][20]}))
    for name, ask in {**ASKS, "ended": ended}.items():
        engine.add(ask.requests(name))
    counts: dict[str, Counter[str]] = {}
    while engine.has_work:
        for event in engine.step():
            count = counts.setdefault(event.request_id, Counter())
            num_tokens = len(event.token_ids)
            assert num_tokens - 1 <= event.num_accepted <= min(num_tokens, event.num_drafts)
            count.update(steps=1, tokens=num_tokens, drafts=event.num_drafts, accepted=event.num_accepted)
    stats, total = engine.stats().speculation, sum(counts.values(), Counter())
    assert (stats.num_draft_tokens, sum(stats.accepted_by_position)) == (total["drafts"], stats.num_accepted_tokens)
    assert 0 <= stats.num_accepted_tokens - total["accepted"] <= 3 * 3, "all but those behind three stop tokens"
    assert counts["greedy.0"]["steps"] + counts["greedy.0"]["accepted"] == counts["greedy.0"]["tokens"] == 40
    assert total["accepted"] > 20


def test_an_adaptive_number_of_drafts_changes_no_token() -> None:
    expected, engine = run(build(), ASKS), adaptive()
    got = run(engine, ASKS)
    for name, ask in ASKS.items():
        for i in range(ask.params.n):
            Comparison().same(ask, i, got[f"{name}.{i}"], expected[f"{name}.{i}"])
    assert engine.stats().speculation.num_accepted_tokens > 0


def logprobs_of(engine: Engine, ask: Ask) -> list[tuple[int, TokenLogprobs]]:
    engine.add(ask.requests("a"))
    seen: list[tuple[int, TokenLogprobs]] = []
    while engine.has_work:
        for event in engine.step():
            seen += zip(event.token_ids, event.logprobs or (), strict=True)
    return seen


def test_accepted_drafts_have_the_logprobs_of_plain_tokens() -> None:
    ask = replace(ASKS["greedy"], params=SamplingParams(temperature=0, max_tokens=40, logprobs=2))
    engine = build(proposer=NGRAM)
    pairs = list(zip(logprobs_of(engine, ask), logprobs_of(build(), ask), strict=True))
    assert engine.stats().speculation.num_accepted_tokens > 0
    for (token, got), (expected_token, expected) in pairs:
        assert (token, got.rank, [t for t, _ in got.top]) == (
            expected_token,
            expected.rank,
            [t for t, _ in expected.top],
        )
        assert got.logprob == pytest.approx(expected.logprob, abs=1e-4)


@pytest.mark.parametrize(
    ("way", "least"),
    [
        ({}, 0.95),
        ({"overlap": False}, 0.95),
        ({"num_blocks": 40}, 0.8),
        ({"max_tokens": 8}, 0.95),
        ({"prefix": False}, 0.95),
    ],
    ids=str,
)
def test_a_model_that_drafts_for_itself_is_nearly_always_right(way: dict[str, Any], least: float) -> None:
    """But for penalties, bias and constraints, which it does not know of, and for rounding."""
    asks = {name: ask for name, ask in ASKS.items() if name in ("greedy", "sampled")}
    asks |= {f"more{i}": replace(asks["sampled"], prompt=LOOP[i:] + LOOP[:20], seed=50 + i) for i in range(8)}
    expected, engine = run(build(), asks), build(proposer=ITSELF, **way)
    for _ in range(2):  # prompts are computed, then cached
        got = run(engine, asks)
        for name, ask in asks.items():
            Comparison().same(ask, 0, got[f"{name}.0"], expected[f"{name}.0"])
    stats = engine.stats().speculation
    assert stats.num_accepted_tokens > least * stats.num_draft_tokens
    assert (engine.stats().preemptions_total > 0) == ("num_blocks" in way)


def test_a_draft_model_catches_up_after_a_pause() -> None:
    ask = Ask(LOOP, SamplingParams(temperature=0.8, max_tokens=60), seed=4)
    expected, engine = run(build(), {"a": ask}), build(proposer=ITSELF)
    policy = Pausing(3, lookahead=3)
    engine.scheduler.speculation = policy
    assert run(engine, {"a": ask}) == expected
    assert policy.stats.num_accepted_tokens >= 0.95 * policy.stats.num_draft_tokens > 10


class Pausing(FixedSpeculation):
    """Speculates in every other dozen of steps."""

    steps = 0

    @property
    def proposes(self) -> bool:
        return self.steps // 12 % 2 == 0

    def choose(self, requests: Sequence[Request], num_others: int) -> Mapping[str, int]:
        self.steps += 1
        return super().choose(requests, num_others)
