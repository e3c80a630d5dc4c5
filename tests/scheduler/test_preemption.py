"""Who gives way (the cheapest to recompute, the latest, the least urgent), and how it comes back."""

from __future__ import annotations

import pytest

from jaxserve.blocks import BlockManager
from jaxserve.plan import StepResult
from jaxserve.request import FinishReason, Request
from jaxserve.scheduler import fcfs, priority
from jaxserve.scheduler.preemption import choose_victim, recompute_cost
from tests.property.simulated import Engine, make_request, make_scheduler, shares, solo_run

SIZE = 4


def running(
    blocks: BlockManager, id: str, num_tokens: int, *, arrived_at: float = 0.0, priority: int = 0, max_tokens: int = 40
) -> Request:
    """A request that has computed a prompt of its own."""
    prompt = [ord(id[0]) + at for at in range(num_tokens)]
    request = make_request(id, prompt, max_tokens=max_tokens, arrived_at=arrived_at, priority=priority)
    blocks.allocate(request, blocks.match(request), num_tokens)
    request.computed = num_tokens
    blocks.publish(request)
    return request


def test_without_a_cache_everything_is_lost() -> None:
    blocks = BlockManager(100, SIZE, enable_prefix_caching=False)
    assert recompute_cost(running(blocks, "a", 18), 1, blocks) == 18


def test_cached_blocks_are_kept_but_for_those_that_are_needed_at_once() -> None:
    blocks = BlockManager(100, SIZE)
    request = running(blocks, "a", 18)  # four published blocks, and one with two tokens
    assert recompute_cost(request, 1, blocks) == 2
    assert recompute_cost(request, 2, blocks) == 2 + SIZE
    assert recompute_cost(request, 9, blocks) == 18


def test_the_cheapest_to_recompute_gives_way() -> None:
    blocks = BlockManager(100, SIZE)
    cheap, dear = running(blocks, "a", 17), running(blocks, "b", 7, arrived_at=1.0)
    assert choose_victim([cheap, dear], 1, blocks, fcfs) is cheap


def test_of_equal_ones_the_latest_gives_way() -> None:
    blocks = BlockManager(100, SIZE)
    first, last, middle = (running(blocks, id, 9, arrived_at=at) for id, at in (("a", 1.0), ("b", 3.0), ("c", 2.0)))
    assert choose_victim([first, last, middle], 1, blocks, fcfs) is last


def test_the_least_urgent_gives_way_under_the_priority_policy() -> None:
    blocks = BlockManager(100, SIZE)
    urgent = running(blocks, "a", 9, priority=0)
    patient = running(blocks, "b", 7, priority=3)
    assert choose_victim([urgent, patient], 1, blocks, priority) is patient
    assert choose_victim([urgent, patient], 1, blocks, fcfs) is urgent


def test_a_request_that_can_finish_in_its_blocks_is_spared() -> None:
    blocks = BlockManager(100, SIZE)
    finishing = running(blocks, "a", 9, max_tokens=4)  # computes 12 tokens in all
    other = running(blocks, "b", 11)
    assert choose_victim([finishing, other], 1, blocks, fcfs) is other
    assert choose_victim([finishing], 1, blocks, fcfs) is None


def test_a_preempted_request_waits_for_its_token_in_flight() -> None:
    scheduler = make_scheduler()
    request = make_request("a", [1, 2])
    scheduler.add(request)
    first = scheduler.plan()
    scheduler._preempt(request)
    assert not scheduler.plan()
    scheduler.update(first, StepResult(((9,),), (None,)))
    assert scheduler.plan().rows[0].history == (1, 2, 9)


def test_a_preempted_request_may_end_by_its_token_in_flight() -> None:
    scheduler = make_scheduler()
    request = make_request("a", [1, 2], stop_ids=(9,))
    scheduler.add(request)
    first = scheduler.plan()
    scheduler._preempt(request)
    (event,) = scheduler.update(first, StepResult(((9,),), (None,)))
    assert (event.token_ids, event.finish) == ((9,), FinishReason.STOP)
    assert (scheduler.has_work, scheduler.num_waiting) == (False, 0)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_preempts_admits_nobody_and_names_its_victim(overlap: bool) -> None:
    scheduler = make_scheduler(num_blocks=8, max_num_seqs=2, caching=False)
    engine = Engine(scheduler, overlap=overlap)
    first, second = (make_request(f"r{i}", range(7), max_tokens=20, arrived_at=float(i)) for i in range(2))
    tiny = make_request("tiny", [1], arrived_at=2.0)
    for request in (first, second, tiny):
        engine.add(request)
    while not (plan := engine.step()).preempted:
        pass
    assert plan.preempted == ("r1",)
    assert shares(plan) == {"r0": 1}  # although row and blocks for the tiny one are free now
    assert second.preemptions == 1
    assert (second.row, second.computed, second.blocks) == (-1, 0, [])
    while "r1" not in shares(plan := engine.step()):
        pass
    back = next(row for row in plan.rows if row.request_id == "r1")
    assert (back.fresh, back.start) == (True, 0)
    assert back.history == tuple(second.prompt + solo_run(second))[: len(back.history)]
    assert len(back.history) > len(second.prompt)
    engine.run()
    for request in (first, second, tiny):
        assert engine.outputs[request.id] == solo_run(request)
    assert scheduler.preemptions_total == sum(event.num_preemptions for event in engine.finished.values())
