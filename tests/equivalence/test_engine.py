"""The same tokens in every way of serving them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from jaxserve.plan import TokenLogprobs
from jaxserve.sampling_params import SamplingParams
from jaxserve.speculative import NgramProposer
from jaxserve.structured import AllowedTokens
from tests.equivalence.harness import CONTEXT, MODEL, Ask, Comparison, build, run


def some_asks(seed: int, count: int = 40) -> dict[str, Ask]:
    """Requests of all kinds; many share a prefix."""
    rng = random.Random(seed)
    prefixes = [tuple(rng.randrange(MODEL.vocab_size) for _ in range(40)) for _ in range(3)]
    asks = {}
    for i in range(count):
        prefix = rng.choice(prefixes)[: rng.randrange(41)]
        own = tuple(rng.randrange(MODEL.vocab_size) for _ in range(rng.randrange(1, 20)))
        kind: dict[str, Any] = rng.choice(
            [
                {"temperature": 0},
                {"temperature": 0},
                {"temperature": 0.9},
                {"temperature": 1.3, "top_k": 9, "top_p": 0.9},
                {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
                {"temperature": 0.8, "presence_penalty": 1.1, "logit_bias": {7: 2.0}},
            ]
        )
        asks[f"r{i}"] = Ask(
            prompt=prefix + own,
            params=SamplingParams(n=rng.choice([1, 1, 1, 3]), max_tokens=rng.randrange(1, 30), **kind),
            seed=rng.randrange(2**40),
            stop_ids=frozenset({3}) if rng.random() < 0.4 else frozenset(),
            salt=rng.choice([None, None, "a"]),
        )
    return asks


ASKS = some_asks(1)
NGRAM = NgramProposer(num_drafts=4, longest=3, shortest=1)


@pytest.fixture(scope="module")
def solo() -> dict[str, list[int]]:
    """Each request's answer when it is alone in an engine that reuses nothing and overlaps nothing."""
    answers: dict[str, list[int]] = {}
    for name, ask in ASKS.items():
        answers |= run(build(prefix=False, overlap=False), {name: ask})
    return answers


def compare(got: dict[str, list[int]], solo: dict[str, list[int]]) -> Comparison:
    comparison = Comparison()
    for request_id, tokens in got.items():
        name, index = request_id.split(".")
        name = name.split("#")[0]
        comparison.same(ASKS[name], int(index), tokens, solo[f"{name}.{index}"])
    return comparison


WAYS: dict[str, dict[str, Any]] = {
    "batched": {"prefix": False, "overlap": False},
    "overlapped": {"prefix": False},
    "with reference attention": {"backend": "reference", "num_blocks": 40},
    "with prefix cache": {},
    "whole prompts": {"max_tokens": CONTEXT, "enable_chunked_prefill": False},
    "tiny chunks": {"max_tokens": 8},
    "capped prefill": {"long_prefill_token_threshold": 5},
    "preempted": {"num_blocks": 40},
    "preempted without prefix cache": {"num_blocks": 40, "prefix": False},
    "preempted, not overlapped": {"num_blocks": 40, "overlap": False},
    "larger blocks": {"block_size": 16, "num_blocks": 60},
    "by priority": {"scheduling_policy": "priority", "num_blocks": 40},
    "static batches": {"batching": "static"},
    "n-gram drafts": {"proposer": NGRAM},
    "n-gram drafts, not overlapped": {"proposer": NGRAM, "overlap": False},
    "n-gram drafts, preempted": {"proposer": NGRAM, "num_blocks": 40},
    "contiguous regions": {"kv_reservation": "contiguous", "num_blocks": 80},
    "static batches of contiguous regions": {"batching": "static", "kv_reservation": "contiguous", "overlap": False},
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_a_batch_gives_the_tokens_of_solo_runs(way: dict[str, Any], solo: dict[str, list[int]]) -> None:
    engine = build(**way)
    comparison = compare(run(engine, ASKS), solo)
    assert len(comparison.ties) <= 3
    assert (engine.stats().preemptions_total > 0) == (way.get("num_blocks") == 40)


def test_200_random_mixes_with_preemption_give_the_tokens_of_solo_runs(
    solo: dict[str, list[int]], record_property: Callable[[str, object], None]
) -> None:
    rng = random.Random(2)
    total = Comparison()
    preemptions = 0
    for mix in range(200):
        names = rng.sample(sorted(ASKS), rng.randrange(3, 9))
        engine = build(num_blocks=30, overlap=mix % 4 != 0, prefix=mix % 3 != 0)
        arrivals = {name: rng.randrange(25) for name in names}
        comparison = compare(run(engine, {name: ASKS[name] for name in names}, arrivals=arrivals), solo)
        total.tokens += comparison.tokens
        total.ties += comparison.ties
        preemptions += engine.stats().preemptions_total
    print(f"\n{total.tokens} tokens compared, {len(total.ties)} ties, {preemptions} preemptions")
    record_property("ties", len(total.ties))
    assert preemptions > 200
    assert len(total.ties) < 1e-3 * total.tokens


def test_a_full_prefix_hit_recomputes_one_token(solo: dict[str, list[int]]) -> None:
    name = next(n for n, a in ASKS.items() if len(a.prompt) > 30 and a.params.n == 1)
    engine = build()
    first = run(engine, {name: ASKS[name]})
    computed = engine.clock.tokens
    again = run(engine, {name: ASKS[name]})
    assert first == again == {f"{name}.0": solo[f"{name}.0"]}
    outputs = len(solo[f"{name}.0"])
    # The prompt's last block is only in the cache if the output filled it up; the cached rest is not computed again.
    cached = (len(ASKS[name].prompt) + outputs - 1) // 4 * 4
    recomputed = max(1, len(ASKS[name].prompt) - cached)
    assert engine.clock.tokens - computed in (recomputed + outputs - 1, recomputed + outputs)


def test_n_completions_prefill_the_prompt_once() -> None:
    prompt = tuple(range(1, 38))
    engine = build(prefix=False)
    tokens = run(engine, {"a": Ask(prompt, SamplingParams(n=4, temperature=1.0, max_tokens=5))})
    assert len({tuple(t) for t in tokens.values()}) > 1
    assert engine.clock.tokens <= len(prompt) + 3 + 4 * 5  # once, a token for each fork, and the outputs


def test_other_salts_share_nothing() -> None:
    prompt = tuple(range(1, 41))
    engine = build()
    for salt in ("a", "b", None):
        run(engine, {"x": Ask(prompt, SamplingParams(temperature=0, max_tokens=2), salt=salt)})
    assert engine.stats().prefix_hits_total == 0
    run(engine, {"x": Ask(prompt, SamplingParams(temperature=0, max_tokens=2), salt="b")})
    assert engine.stats().prefix_hits_total == len(prompt) - 1


def test_two_requests_that_overfill_a_pool_of_ten_blocks_both_answer_right() -> None:
    asks = {
        name: Ask(tuple(range(start, start + 40)), SamplingParams(temperature=0, max_tokens=50))
        for name, start in (("a", 1), ("b", 15))
    }
    large = run(build(block_size=16, num_blocks=60), asks)
    small = build(block_size=16, num_blocks=11)
    got = run(small, asks)
    for name, ask in asks.items():
        Comparison().same(ask, 0, got[f"{name}.0"], large[f"{name}.0"])
    assert small.stats().preemptions_total > 0


def test_constraints_see_every_token_in_time() -> None:
    allowed = {5, 9, 17}
    ask = Ask(
        (1, 2, 3),
        SamplingParams(temperature=1.0, max_tokens=20),
        constraint=lambda: AllowedTokens(allowed, MODEL.vocab_size),
    )
    free = Ask((1, 2, 3), SamplingParams(temperature=1.0, max_tokens=20))
    tokens = run(build(), {"tied": ask, "free": free})
    assert set(tokens["tied.0"]) <= allowed
    assert not set(tokens["free.0"]) <= allowed


def test_logprobs_belong_to_their_tokens() -> None:
    engine = build()
    asked = Ask(tuple(range(1, 20)), SamplingParams(temperature=0, max_tokens=6, logprobs=3))
    plain = Ask(tuple(range(1, 20)), SamplingParams(temperature=0, max_tokens=6))
    engine.add(asked.requests("a") + plain.requests("b"))
    seen: dict[str, list[tuple[int, TokenLogprobs]]] = {"a.0": []}
    while engine.has_work:
        for event in engine.step():
            if event.request_id == "a.0" and event.token_ids:
                assert event.logprobs is not None
                seen["a.0"] += zip(event.token_ids, event.logprobs, strict=True)
            elif event.token_ids:
                assert event.logprobs is None
    assert len(seen["a.0"]) == 6
    for token, entry in seen["a.0"]:
        assert (entry.rank, entry.top[0][0]) == (1, token)
        assert entry.top[0][1] == pytest.approx(entry.logprob)
        assert [p for _, p in entry.top] == sorted((p for _, p in entry.top), reverse=True)


def test_an_aborted_request_frees_its_blocks_and_disturbs_nobody(solo: dict[str, list[int]]) -> None:
    keep = next(n for n, a in ASKS.items() if a.params.n == 1 and a.params.greedy and len(solo[f"{n}.0"]) > 12)
    engine = build()
    engine.add(ASKS[keep].requests(keep))
    engine.add(Ask(tuple(range(30)), SamplingParams(temperature=0, max_tokens=60)).requests("gone"))
    tokens: list[int] = []
    for step in range(400):
        if step == 4:
            engine.finish("gone.0")
        tokens += [t for event in engine.step() if event.request_id == f"{keep}.0" for t in event.token_ids]
        if not engine.has_work:
            break
    Comparison().same(ASKS[keep], 0, tokens, solo[f"{keep}.0"])
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_the_clock_counts_tokens_and_places_of_kv() -> None:
    ask = Ask(tuple(range(1, 7)), SamplingParams(temperature=0, max_tokens=4))
    for way, slots in (("paged", 8 + 8 + 8 + 12), ("contiguous", 4 * CONTEXT)):
        engine = build(kv_reservation=way, num_blocks=80)
        run(engine, {"a": ask})
        clock, stats = engine.clock, engine.stats()
        assert (clock.rows, clock.most_rows) == (4, 1)
        assert (clock.kv_tokens, clock.kv_slots) == (6 + 7 + 8 + 9, slots)
        assert stats.kv_waste == pytest.approx(1 - 9 / (12 if way == "paged" else CONTEXT))
