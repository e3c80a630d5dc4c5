"""Snapshots of the real scheduler on a simulated device, and the map that they draw."""

from __future__ import annotations

import time
from random import Random

import numpy as np
import pytest

from jaxserve.live import MAX_STEPS, BlockMap, Latency, Recorder, Snapshot, percentiles
from jaxserve.outputs import EngineStats
from jaxserve.request import Request
from jaxserve.scheduler import FixedSpeculation
from tests.property.simulated import Engine, make_request, make_scheduler


class Replayed:
    """What a page has, that was shown the first map whole and then changes only."""

    def __init__(self, drawn: BlockMap) -> None:
        self.owners, self.refs = drawn.owners.copy(), drawn.refs.copy()


def check(snapshot: Snapshot, drawn: BlockMap, engine: Engine, requests: list[Request]) -> None:
    pool = engine.blocks.pool
    free = set(pool.free_blocks())
    running, _ = engine.scheduler.queues
    keys = dict(zip([request.id for request in running], [table.key for table in snapshot.tables], strict=True))
    assert len(set(keys.values())) == len(keys)
    for block in range(1, pool.num_blocks):
        users = [request for request in running if block in request.blocks]
        assert drawn.refs[block - 1] == len(users)
        if users:
            assert drawn.owners[block - 1] == keys[users[0].id]
        else:
            assert block in free
            assert drawn.owners[block - 1] == (block in pool._content)
    assert (drawn.owners == 1).sum() == pool.num_cached
    assert snapshot.num_requests == len(engine.scheduler._requests)
    assert [row.id for row in snapshot.requests[: len(running)]] == [request.id for request in running]
    for row in snapshot.requests:
        assert row.computed_tokens <= row.prompt_tokens + row.output_tokens


@pytest.mark.parametrize("seed", range(3))
def test_every_block_is_on_the_map_as_it_is(seed: int) -> None:
    rng = Random(seed)
    scheduler = make_scheduler(num_blocks=26, max_num_seqs=6, speculation=FixedSpeculation(2, 2))
    engine, recorder = Engine(scheduler, max_drafts=2), Recorder(scheduler)
    drawn = BlockMap(25)
    replayed = Replayed(drawn)
    requests: list[Request] = []
    keys: dict[str, int] = {}
    most_refs = 0
    for turn in range(150):
        if rng.random() < 0.5:
            prompt = [*[1, 2, 3, 4, 5, 6, 7, 8][: rng.choice((0, 4, 8))], *[rng.randrange(29) for _ in range(9)]]
            n = rng.choice((1, 1, 2))
            first: Request | None = None
            for index in range(n):
                request = make_request(
                    f"r{turn}.{index}", prompt, max_tokens=rng.randint(1, 30), fork_of=first, arrived_at=turn
                )
                first = first or request
                engine.add(request)
                requests.append(request)
        if rng.random() < 0.05 and scheduler._requests:
            engine.abort(rng.choice(list(scheduler._requests)))
        if engine.busy:
            engine.step()
        if rng.random() < 0.6:
            snapshot = recorder.take(EngineStats())
            before = drawn.owners
            changes = drawn.update(snapshot)
            assert drawn.owners is not before  # who still draws the one before is not disturbed
            replayed.owners[changes.cells] = changes.owners
            replayed.refs[changes.cells] = changes.refs
            assert (replayed.owners == drawn.owners).all()
            assert (replayed.refs == drawn.refs).all()
            check(snapshot, drawn, engine, requests)
            new = {row.id: row.key for row in snapshot.requests}
            assert all(keys[id] == key for id, key in new.items() if id in keys)
            keys = new
            most_refs = max(most_refs, int(drawn.refs.max()))
    assert most_refs >= 2
    assert scheduler.preemptions_total > 0


def test_what_a_snapshot_has_seen_does_not_change_with_the_engine() -> None:
    scheduler = make_scheduler()
    engine, recorder = Engine(scheduler), Recorder(scheduler)
    engine.add(make_request("a", range(20), max_tokens=30))
    engine.step()
    early = recorder.take(EngineStats())
    wanted = BlockMap(99)
    wanted.update(early)
    while engine.busy:
        engine.step()
    late = BlockMap(99)
    late.update(early)
    assert (late.owners == wanted.owners).all()
    assert (late.owners >= 2).sum() == 4


def test_keys_go_round_and_none_is_given_twice() -> None:
    recorder = Recorder(make_scheduler())
    recorder._give_keys(["a", "b"])
    assert recorder._keys == {"a": 2, "b": 3}
    recorder._newest_key = 2**16 - 1
    recorder._give_keys(["b", "c", "d"])
    assert recorder._keys == {"b": 3, "c": 2, "d": 4}


def test_steps_are_told_by_what_their_rows_do_and_the_oldest_are_dropped() -> None:
    scheduler = make_scheduler(budget=16, speculation=FixedSpeculation(2, 2))
    engine, recorder = Engine(scheduler, max_drafts=2), Recorder(scheduler)
    engine.add(make_request("a", range(20), max_tokens=60))
    engine.add(make_request("b", range(3), max_tokens=60, arrived_at=1.0))
    for _ in range(8):
        plan = engine.step()
        recorder.note_step(plan, plan.kind, plan.num_tokens + 3, 0.5)
        step = recorder.take(EngineStats()).steps[-1]
        assert step.prefill_tokens + step.decode_tokens + step.verify_tokens == plan.num_tokens
        assert (step.padding_tokens, step.num_rows, step.seconds) == (3, len(plan.rows), 0.5)
        assert (step.verify_tokens > 0) == any(row.num_drafts for row in plan.rows)
    assert recorder.take(EngineStats()).steps[0].prefill_tokens == 16
    for _ in range(600):
        recorder.note_step(plan, plan.kind, 8, 0.1)
    taken = recorder.take(EngineStats())
    assert (len(taken.steps), taken.num_steps) == (MAX_STEPS, 608)


def test_waits_are_those_of_the_last_minute() -> None:
    latency, now = Latency(), time.monotonic()
    latency.note_first(9.0, now - 61)
    latency.note_first(1.0, now - 1)
    latency.note_next(4, 0.4, now)
    ttft, itl = latency.recent(now)
    assert ttft == (1.0,)
    assert itl == pytest.approx([0.1] * 4)
    for _ in range(3000):
        latency.note_next(1, 0.2, now)
    assert len(latency.recent(now)[1]) == 2000
    assert percentiles(()) == {"p50": None, "p90": None, "p99": None, "count": 0}
    assert percentiles(tuple(np.linspace(0, 1, 101))) == {"p50": 0.5, "p90": 0.9, "p99": 0.99, "count": 101}
