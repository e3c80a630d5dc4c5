"""Whatever the mix of requests and settings, every request gets the tokens that it gets alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.request import FinishReason, Request
from jaxserve.runner.buckets import Buckets
from jaxserve.scheduler import AdaptiveSpeculation, FixedSpeculation, Patience, Speculation
from tests.property.simulated import Engine, check_blocks, make_request, make_scheduler, solo_run


@dataclass(frozen=True)
class Arrival:
    """One request of a mix: a shared prefix and an own rest, ``n`` completions, and when it comes and is aborted."""

    at: int
    family: int
    shared: int
    own: int
    max_tokens: int
    n: int
    variant: int
    priority: int
    stops: bool
    abort_after: int | None


@dataclass(frozen=True)
class Mix:
    """Settings of the engine and the requests that come."""

    block_size: int
    spare_blocks: int
    budget: int
    max_num_seqs: int
    threshold: int
    chunked: bool
    caching: bool
    overlap: bool
    sequential_copies: bool
    policy: str
    max_overtakes: int
    drafts: int
    depth: int | None
    adaptive: bool
    arrivals: tuple[Arrival, ...]


class SomeDrafts(FixedSpeculation):
    """Wants another number of drafts each time, whether they are there or not."""

    def __init__(self, most: int, max_depth: int | None) -> None:
        super().__init__(most, max_depth=max_depth)
        self._random = Random(most)

    def choose(self, requests: Sequence[Request], num_others: int) -> Mapping[str, int]:
        return {request.id: self._random.randint(0, self._num_drafts) for request in requests}


def speculation_of(mix: Mix) -> Speculation:
    """A policy of chains, or of trees of a depth."""
    depth = None if mix.depth is None else min(mix.depth, mix.drafts)
    if not mix.adaptive or not mix.drafts:
        return SomeDrafts(mix.drafts, depth)
    buckets = Buckets(max(budget_of(mix), mix.max_num_seqs), mix.max_num_seqs, mix.drafts)
    pad = lambda tokens, rows: buckets.pick(tokens, rows, has_prefill=False).tokens  # noqa: E731
    return AdaptiveSpeculation(mix.drafts, pad=pad, max_tokens=buckets.max_places, max_depth=depth)


def budget_of(mix: Mix) -> int:
    """Most tokens of a step."""
    return mix.budget if mix.chunked else max(mix.budget, 32)


def small(low: int, high: int) -> st.SearchStrategy[int]:
    return st.integers(low, high)


ARRIVALS = st.builds(
    Arrival,
    at=small(0, 12),
    family=small(0, 1),
    shared=small(0, 20),
    own=small(1, 12),
    max_tokens=small(1, 20),
    n=st.sampled_from((1, 1, 1, 2, 3)),
    variant=small(0, 5),
    priority=small(0, 2),
    stops=st.booleans(),
    abort_after=st.one_of(st.none(), st.none(), small(0, 10)),
)
MIXES = st.builds(
    Mix,
    block_size=st.sampled_from((1, 2, 4, 8)),
    spare_blocks=small(0, 8),
    budget=st.sampled_from((4, 8, 16, 48)),
    max_num_seqs=small(1, 6),
    threshold=st.sampled_from((0, 0, 3)),
    chunked=st.booleans(),
    caching=st.booleans(),
    overlap=st.booleans(),
    sequential_copies=st.booleans(),
    policy=st.sampled_from(("fcfs", "priority")),
    max_overtakes=st.sampled_from((0, 2, 16)),
    drafts=st.sampled_from((0, 0, 1, 3, 5, 8)),
    depth=st.sampled_from((None, None, 1, 2, 4)),
    adaptive=st.booleans(),
    arrivals=st.lists(ARRIVALS, min_size=1, max_size=7).map(tuple),
)


def requests_of(index: int, arrival: Arrival) -> list[Request]:
    """The engine requests of an arrival: the first, and the siblings that fork from it."""
    # Few distinct tokens, so that prefixes part inside blocks; the own part repeats between some arrivals.
    shared = [(arrival.family + 3 * at) % 5 for at in range(arrival.shared)]
    own = [(arrival.own + at * at) % 7 for at in range(arrival.own)]
    first: Request | None = None
    requests = []
    for completion in range(arrival.n):
        request = make_request(
            f"{index}-{completion}",
            shared + own,
            max_tokens=arrival.max_tokens,
            stop_ids=(0, 1) if arrival.stops else (),
            seed=completion,
            fork_of=first,
            adapter=b"a" if arrival.variant == 1 else None,
            cache_salt="a" if arrival.variant == 2 else None,
            priority=arrival.priority,
            arrived_at=float(arrival.at),
        )
        first = first or request
        requests.append(request)
    return requests


def engine_for(mix: Mix, requests: list[Request]) -> Engine:
    """An engine whose pool just holds the largest request, and a few blocks more."""
    largest = max(-(-(request.max_total - 1) // mix.block_size) for request in requests)
    scheduler = make_scheduler(
        num_blocks=1 + largest + mix.spare_blocks,
        block_size=mix.block_size,
        budget=budget_of(mix),
        max_num_seqs=mix.max_num_seqs,
        caching=mix.caching,
        speculation=speculation_of(mix),
        patience=Patience(mix.max_overtakes, max_seconds=1e9),
        long_prefill_token_threshold=mix.threshold,
        enable_chunked_prefill=mix.chunked,
        scheduling_policy=mix.policy,
    )
    return Engine(
        scheduler,
        max_rows=mix.max_num_seqs,
        overlap=mix.overlap,
        sequential_copies=mix.sequential_copies,
        max_drafts=mix.drafts,
    )


def play(mix: Mix) -> tuple[Engine, list[tuple[Arrival, Request]]]:
    """Run the mix to its end, checking the books after every step."""
    served = [(arrival, request) for i, arrival in enumerate(mix.arrivals) for request in requests_of(i, arrival)]
    requests = [request for _, request in served]
    engine = engine_for(mix, requests)
    # Alone and one token per step each would take this long; a preemption can cost a request all it has.
    max_steps = 40 + 4 * sum(request.max_total for request in requests)
    for step in range(max_steps):
        for arrival, request in served:
            if arrival.at == step:
                engine.add(request)
            if arrival.abort_after is not None and arrival.at + arrival.abort_after == step:
                engine.abort(request.id)
        plan = engine.step()
        assert plan.num_tokens <= budget_of(mix)
        assert engine.scheduler.num_running <= mix.max_num_seqs
        check_blocks(engine.blocks, requests)
        if step > 12 and not engine.busy:
            return engine, served
    raise AssertionError("a request starves")


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(MIXES)
def test_every_request_gets_its_solo_tokens(mix: Mix) -> None:
    engine, served = play(mix)
    for arrival, request in served:
        expected = solo_run(request)
        end = engine.finished[request.id]
        if end.finish is FinishReason.ABORT:
            assert arrival.abort_after is not None
            assert engine.outputs[request.id] == expected[: len(engine.outputs[request.id])]
        else:
            assert engine.outputs[request.id] == expected
            assert end.finish is (FinishReason.STOP if expected[-1] in request.stop_ids else FinishReason.LENGTH)
        assert (request.row, request.blocks, request.pending) == (-1, [], 0)
    assert engine.blocks.num_free == engine.blocks.num_blocks - 1
    assert engine.scheduler.num_running == engine.scheduler.num_waiting == 0
    assert engine.scheduler.generation_tokens_total == sum(len(output) for output in engine.outputs.values())


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("caching", [False, True])
def test_preempted_requests_lose_no_tokens(overlap: bool, caching: bool) -> None:
    """Two requests that together need 14 of 10 blocks."""
    scheduler = make_scheduler(num_blocks=10, block_size=16, budget=512, caching=caching)
    engine = Engine(scheduler, overlap=overlap)
    requests = [make_request(f"r{i}", range(i, i + 40), max_tokens=72, seed=i) for i in range(2)]
    for request in requests:
        engine.add(request)
    engine.run()
    assert scheduler.preemptions_total > 0
    assert sum(request.preemptions for request in requests) == scheduler.preemptions_total
    assert scheduler.preemptions_total <= 2, "the pool is fought over"
    for request in requests:
        assert engine.outputs[request.id] == solo_run(request)
        assert engine.finished[request.id].num_preemptions == request.preemptions
    assert engine.blocks.num_free == engine.blocks.num_blocks - 1


@pytest.mark.parametrize("caching", [False, True])
def test_a_request_is_not_starved_by_a_stream_of_later_ones(caching: bool) -> None:
    """A large request, in a pool that two fill, finishes while small ones keep coming."""
    engine = Engine(make_scheduler(num_blocks=13, budget=32, caching=caching, patience=Patience(3, max_seconds=1e9)))
    for i in range(3):
        engine.add(make_request(f"early{i}", range(i, i + 10), max_tokens=6))
    large = make_request("large", range(20), max_tokens=25, arrived_at=1.0)
    engine.add(large)
    for step in range(300):
        engine.add(make_request(f"late{step:03}", [step % 29, 3, 5], max_tokens=5, arrived_at=2.0 + step))
        engine.step()
        if "large" in engine.finished:
            break
    assert engine.outputs["large"] == solo_run(large)
    assert any(request_id.startswith("late") for request_id in engine.finished)
