"""Who may start: small requests pass blocked ones, but not for ever; rules are asked and told."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from jaxserve.request import Request
from jaxserve.scheduler import AdmissionRule, Patience
from tests.property.simulated import Engine, make_request, make_scheduler


class Clock:
    """A clock that is set by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class OneAtATime:
    """A rule with one slot for all requests whose id starts with ``slow``."""

    def __init__(self, holds_place: bool) -> None:
        self.holds_place = holds_place
        self.inside: list[str] = []

    def begin_step(self, running: Collection[Request]) -> None:
        pass

    def admits(self, request: Request, running: Collection[Request]) -> bool:
        return not (request.id.startswith("slow") and any(other.id.startswith("slow") for other in running))

    def note_admitted(self, request: Request) -> None:
        self.inside.append(request.id)

    def note_released(self, request: Request) -> None:
        self.inside.remove(request.id)


def make_engine(num_blocks: int, patience: Patience | None = None, *rules: AdmissionRule) -> Engine:
    return Engine(make_scheduler(num_blocks=num_blocks, budget=64, caching=False, admission=rules, patience=patience))


def row_ids(engine: Engine) -> list[str]:
    return [row.request_id for row in engine.step().rows]


def test_a_small_request_passes_one_that_does_not_fit() -> None:
    engine = make_engine(11)
    engine.add(make_request("first", range(16), max_tokens=5))
    engine.add(make_request("large", range(32), max_tokens=5, arrived_at=1.0))
    engine.add(make_request("small", range(4), max_tokens=5, arrived_at=2.0))
    assert row_ids(engine) == ["first", "small"]


def test_nothing_passes_a_request_that_has_been_overtaken_too_often() -> None:
    engine = make_engine(11, Patience(max_overtakes=2, max_seconds=1e9))
    engine.add(make_request("first", range(16), max_tokens=9))
    engine.add(make_request("large", range(32), max_tokens=5, arrived_at=1.0))
    for i in range(4):
        engine.add(make_request(f"small{i}", [i], max_tokens=2, arrived_at=2.0 + i))
    assert row_ids(engine) == ["first", "small0", "small1"]
    order = [request_id for _ in range(20) for request_id in row_ids(engine)]
    assert order.index("large") < order.index("small2") < order.index("small3")


def test_nothing_passes_a_request_that_has_been_blocked_too_long() -> None:
    clock = Clock()
    engine = make_engine(11, Patience(max_overtakes=100, max_seconds=5.0, clock=clock))
    engine.add(make_request("first", range(16), max_tokens=9))
    engine.add(make_request("large", range(32), max_tokens=5, arrived_at=1.0))
    assert row_ids(engine) == ["first"]
    engine.add(make_request("small0", [1], arrived_at=2.0))
    clock.now = 4.9
    assert "small0" in row_ids(engine)
    engine.add(make_request("small1", [1], arrived_at=3.0))
    clock.now = 5.0
    assert "small1" not in row_ids(engine)
    order = [request_id for _ in range(20) for request_id in row_ids(engine)]
    assert order.index("large") < order.index("small1")


def test_patience_starts_anew_with_another_head() -> None:
    patience = Patience(max_overtakes=1, max_seconds=1e9)
    first, second = make_request("a", [1]), make_request("b", [1])
    patience.note_blocked(first)
    patience.note_overtaken()
    patience.note_blocked(first)
    assert patience.exhausted
    patience.note_blocked(second)
    assert not patience.exhausted


@pytest.mark.parametrize("holds_place", [True, False])
def test_a_rule_holds_a_request_back_and_others_pass(holds_place: bool) -> None:
    rule = OneAtATime(holds_place)
    engine = make_engine(100, None, rule)
    for at, request_id in enumerate(("slow0", "slow1", "quick")):
        engine.add(make_request(request_id, [1, 2], max_tokens=3, arrived_at=float(at)))
    assert row_ids(engine) == ["slow0", "quick"]
    assert rule.inside == ["slow0", "quick"]
    engine.run()
    assert set(engine.finished) == {"slow0", "slow1", "quick"}
    assert rule.inside == []


def test_a_place_is_held_only_for_a_request_that_waits_for_running_ones() -> None:
    for holds_place, passes in ((True, False), (False, True)):
        engine = make_engine(100, Patience(max_overtakes=0, max_seconds=1e9), OneAtATime(holds_place))
        for at, request_id in enumerate(("slow0", "slow1", "quick")):
            engine.add(make_request(request_id, [1, 2], max_tokens=3, arrived_at=float(at)))
        assert ("quick" in row_ids(engine)) == passes


def test_blocks_that_admitted_prompts_still_need_are_not_given_away() -> None:
    """Two prompts that fit one by one, but not together, while the first is still being computed in chunks."""
    scheduler = make_scheduler(num_blocks=13, budget=64, caching=False, long_prefill_token_threshold=4)
    engine = Engine(scheduler)
    engine.add(make_request("a", range(32), max_tokens=2))
    engine.add(make_request("b", range(30), max_tokens=2, arrived_at=1.0))
    assert row_ids(engine) == ["a"]
    assert engine.blocks.num_free == 11
    engine.run()
    assert scheduler.preemptions_total == 0


@pytest.mark.parametrize(("preemptions", "starts"), [(0, True), (1, False)])
def test_a_preempted_request_comes_back_only_with_blocks_to_spare(preemptions: int, starts: bool) -> None:
    engine = make_engine(10)
    engine.add(make_request("running", range(20), max_tokens=5))
    engine.step()
    request = make_request("r", range(12), arrived_at=1.0)
    request.preemptions = preemptions
    engine.add(request)  # needs three of the four free blocks
    assert ("r" in row_ids(engine)) == starts
    engine.run()
    assert "r" in engine.finished


def test_the_search_for_a_smaller_request_is_bounded() -> None:
    engine = make_engine(11)
    engine.add(make_request("first", range(16), max_tokens=5))
    for i in range(16):
        engine.add(make_request(f"large{i}", range(32), max_tokens=5, arrived_at=1.0))
    engine.add(make_request("small", range(4), max_tokens=5, arrived_at=2.0))
    assert row_ids(engine) == ["first"]
    engine.abort("large7")
    assert row_ids(engine) == ["first", "small"]
