"""The policies for comparison: batches that nobody joins, and KV in regions for the longest context."""

from __future__ import annotations

import pytest

from jaxserve.blocks import BlockManager, ContiguousBlockManager, Prefix, make_blocks
from jaxserve.config import CacheConfig, EngineConfig, SchedulerConfig
from jaxserve.errors import ConfigError, RequestError
from jaxserve.request import FinishReason
from jaxserve.scheduler import Patience, Scheduler, StaticBatching
from tests.property.simulated import Engine, check_blocks, make_request, make_scheduler, shares, solo_run


class Clock:
    """A clock that is set by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def row_ids(engine: Engine) -> list[str]:
    return [row.request_id for row in engine.step().rows]


def static_engine(clock: Clock, *, num_blocks: int = 200, budget: int = 64, max_num_seqs: int = 8) -> Engine:
    rule = StaticBatching(clock)
    return Engine(make_scheduler(num_blocks=num_blocks, budget=budget, max_num_seqs=max_num_seqs, admission=[rule]))


def test_late_arrivals_wait_until_all_of_the_batch_have_ended() -> None:
    clock = Clock()
    engine = static_engine(clock)
    engine.add(make_request("short", [1, 2], max_tokens=2))
    engine.add(make_request("long", [3, 4], max_tokens=9))
    assert row_ids(engine) == ["long", "short"]
    clock.now = 1.0
    engine.add(make_request("late", [5, 6], max_tokens=2, arrived_at=0.5))
    while "long" not in engine.finished:
        assert "late" not in row_ids(engine)
    assert "short" in engine.finished
    engine.run()
    assert set(engine.finished) == {"short", "long", "late"}
    check_blocks(engine.blocks, [])


def test_a_place_that_becomes_free_is_not_given_away_before_the_batch_has_ended() -> None:
    engine = static_engine(Clock(), max_num_seqs=2)
    for at, (name, tokens) in enumerate((("a", 2), ("b", 9), ("c", 2), ("d", 2))):
        engine.add(make_request(name, [at], max_tokens=tokens, arrived_at=-10.0 + at))
    while "b" not in engine.finished:
        assert not {"c", "d"} & set(row_ids(engine))
    engine.run()
    assert {tuple(shares(plan)) for plan in engine.plans if plan} == {("a", "b"), ("b",), ("c", "d")}


def test_a_batch_that_takes_several_steps_to_start_is_still_one() -> None:
    clock = Clock()
    engine = static_engine(clock, budget=8)
    for name in ("a", "b", "c"):
        engine.add(make_request(name, range(6), max_tokens=9, arrived_at=-1.0))
    assert row_ids(engine) == ["a", "b"]
    clock.now = 1.0
    engine.add(make_request("late", [1], max_tokens=2, arrived_at=1.0))
    assert row_ids(engine) == ["a", "b", "c"]
    engine.run()
    assert all({"late", "c"} - set(shares(plan)) for plan in engine.plans)


def test_an_aborted_member_closes_the_batch_and_an_empty_engine_opens_a_new_one() -> None:
    engine = static_engine(Clock(), max_num_seqs=1)
    engine.add(make_request("a", [1]))
    engine.add(make_request("b", [2], arrived_at=-1.0))
    assert row_ids(engine) == ["b"]
    engine.abort("b")
    assert row_ids(engine) == ["a"]
    engine.run()
    assert engine.finished["a"].finish is FinishReason.LENGTH


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_preempted_members_come_back_and_everybody_is_served(policy: str) -> None:
    scheduler = make_scheduler(
        num_blocks=13,
        budget=64,
        caching=False,
        admission=[StaticBatching()],
        patience=Patience(max_overtakes=0, max_seconds=1e9),
        scheduling_policy=policy,
    )
    engine = Engine(scheduler)
    requests = [make_request(f"r{i}", range(6 + i), max_tokens=14, arrived_at=float(i), priority=-i) for i in range(7)]
    for request in requests[:4]:
        engine.add(request)
    for _ in range(4):
        engine.step()
    for request in requests[4:]:
        engine.add(request)
    engine.run()
    assert scheduler.preemptions_total > 0
    assert engine.outputs == {request.id: solo_run(request) for request in requests}
    check_blocks(engine.blocks, [])


def test_the_setting_puts_the_rule_before_others() -> None:
    engine = Engine(make_scheduler(budget=64, batching="static"))
    engine.add(make_request("a", [1], max_tokens=9))
    engine.step()
    engine.add(make_request("b", [2], max_tokens=9, arrived_at=1e12))
    assert row_ids(engine) == ["a"]
    other = Engine(make_scheduler(budget=64, batching="continuous"))
    other.add(make_request("a", [1], max_tokens=9))
    other.step()
    other.add(make_request("b", [2], max_tokens=9, arrived_at=1e12))
    assert row_ids(other) == ["a", "b"]


def contiguous_engine(num_blocks: int, region_tokens: int, **config: bool) -> Engine:
    blocks = ContiguousBlockManager(num_blocks, 4, region_tokens=region_tokens)
    return Engine(
        Scheduler(
            SchedulerConfig(**config),  # type: ignore[arg-type]
            blocks,
            max_num_batched_tokens=64,
            max_num_seqs=16,
            patience=Patience(max_seconds=1e9),
        )
    )


@pytest.mark.parametrize(("num_blocks", "fit"), [(1 + 15, 3), (1 + 19, 3), (1 + 20, 4)])
def test_as_many_run_as_regions_fit_into_the_pool(num_blocks: int, fit: int) -> None:
    engine = contiguous_engine(num_blocks, region_tokens=18)  # five blocks of four
    requests = [make_request(f"r{i}", [7, 7, i % 3], max_tokens=3 + i, arrived_at=float(i)) for i in range(9)]
    for request in requests:
        engine.add(request)
    assert len(engine.step().rows) == fit
    assert engine.blocks.num_free == num_blocks - 1 - 5 * fit
    engine.run()
    assert max(len(plan.rows) for plan in engine.plans) == fit
    assert engine.scheduler.preemptions_total == 0
    assert engine.outputs == {request.id: solo_run(request) for request in requests}
    check_blocks(engine.blocks, [])


def test_a_region_is_held_from_the_first_token_to_the_last_and_shared_with_nobody() -> None:
    engine = contiguous_engine(40, region_tokens=18)
    twins = [make_request(f"r{i}", range(9), max_tokens=5, arrived_at=float(i)) for i in range(2)]
    for request in twins:
        engine.add(request)
    first, second = engine.step().rows
    assert len(first.block_ids) == len(second.block_ids) == 5
    assert not set(first.block_ids) & set(second.block_ids)
    assert engine.step().rows[0].block_ids == first.block_ids
    engine.run()
    assert engine.blocks.prefix_queries_total == 0


def test_completions_of_one_prompt_each_have_a_region_of_their_own() -> None:
    engine = contiguous_engine(40, region_tokens=18)
    first = make_request("f0", range(9), max_tokens=5)
    fork = make_request("f1", range(9), max_tokens=5, seed=1, fork_of=first)
    engine.add(first)
    engine.add(fork)
    engine.run()
    assert not any(plan.copies for plan in engine.plans)
    assert engine.outputs == {request.id: solo_run(request) for request in (first, fork)}
    blocks = ContiguousBlockManager(40, 4, region_tokens=18)
    assert blocks.fork(fork, first) == Prefix()


def test_a_request_is_refused_if_not_even_one_region_fits() -> None:
    with pytest.raises(RequestError, match="need 5 KV blocks; there are 4"):
        contiguous_engine(5, region_tokens=18).add(make_request("a", [1]))


def test_the_setting_picks_the_manager() -> None:
    paged = make_blocks(CacheConfig(block_size=8), 10, 64)
    contiguous = make_blocks(CacheConfig(block_size=8, kv_reservation="contiguous"), 10, 60)
    assert type(paged) is BlockManager
    assert (paged.blocks_for(9), contiguous.blocks_for(9)) == (2, 8)
    for name in ("batching", "kv_reservation"):
        with pytest.raises(ConfigError, match=f"{name} must be one of"):
            EngineConfig.from_flat({name: "other"})
