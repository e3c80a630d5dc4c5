"""More adapters than slots: every request runs with its own, nobody starves, and nobody else waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.errors import LoadError
from jaxserve.plan import StepPlan
from jaxserve.request import Request
from jaxserve.scheduler import AdapterSlots, Patience
from tests.property.simulated import Engine, check_blocks, make_request, make_scheduler, solo_run


@dataclass
class Source:
    """Adapters that take ``delay`` looks to be read, and come in ``num_pieces`` pieces."""

    delay: int = 0
    num_pieces: int = 1
    broken: set[bytes] = field(default_factory=set)
    dead: set[bytes] = field(default_factory=set)
    looks: Counter[bytes] = field(default_factory=Counter)
    fetched: list[bytes] = field(default_factory=list)

    def is_live(self, key: bytes) -> bool:
        return key not in self.dead

    def fetch(self, key: bytes) -> Sequence[Any] | None:
        self.looks[key] += 1
        if self.looks[key] <= self.delay:
            return None
        del self.looks[key]
        if key in self.broken:
            raise LoadError(f"{key!r} is broken.")
        self.fetched.append(key)
        return [(key, piece) for piece in range(self.num_pieces)]

    def forget(self, key: bytes) -> None:
        self.looks.pop(key, None)


class AdapterEngine:
    """The simulated engine with adapters; every step checks that each row finds its own, whole, in its slot."""

    def __init__(self, num_slots: int, source: Source, patience: Patience | None = None, **scheduler: Any) -> None:
        self.source = source
        self.num_slots = num_slots
        self.bank: dict[int, list[Any]] = {}
        self.refused: list[str] = []
        self.keys: dict[str, bytes | None] = {}
        self.slots = AdapterSlots(num_slots, source, place=self._place, refuse=self._refuse, patience=patience)
        self.engine = Engine(make_scheduler(admission=(self.slots,), **scheduler))

    def add(self, request: Request) -> None:
        self.keys[request.id] = request.adapter
        self.engine.add(request)

    def step(self) -> StepPlan:
        for request_id in self.refused:
            self.engine.scheduler.abort(request_id)
        self.refused.clear()
        plan = self.engine.step()
        assert len(self.source.looks) <= self.num_slots  # what is asked for and not fetched takes host memory
        for row in plan.rows:
            key = self.keys[row.request_id]
            assert (row.adapter_slot == 0) == (key is None)
            if key is not None:
                assert self.bank[row.adapter_slot] == [(key, piece) for piece in range(self.source.num_pieces)]
        return plan

    def run(self, max_steps: int = 500) -> None:
        for _ in range(max_steps):
            if not self.engine.busy:
                return
            self.step()
        raise AssertionError("a request starves")

    def _place(self, slot: int, piece: Any) -> None:
        held = self.bank.setdefault(slot, [])
        if piece[1] == 0:
            held.clear()
        held.append(piece)

    def _refuse(self, request_id: str, reason: str) -> None:
        self.refused.append(request_id)


def key(index: int) -> bytes:
    return bytes([65 + index])


ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 15),  # step
        st.one_of(st.none(), st.integers(0, 4)),  # adapter
        st.integers(1, 20),  # prompt
        st.integers(1, 12),  # output
        st.one_of(st.none(), st.none(), st.integers(0, 12)),  # aborted after so many steps
        st.integers(0, 2),  # priority
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=200)
@given(
    ARRIVALS,
    st.integers(1, 3),
    st.integers(0, 4),
    st.integers(1, 3),
    st.sampled_from((0, 2, 16)),
    st.integers(12, 30),
    st.sampled_from(("fcfs", "priority")),
    st.integers(1, 8),
)
def test_every_request_gets_its_tokens_by_its_own_adapter(
    arrivals: list[Any],
    num_slots: int,
    delay: int,
    num_pieces: int,
    max_overtakes: int,
    num_blocks: int,
    policy: str,
    max_num_seqs: int,
) -> None:
    engine = AdapterEngine(
        num_slots,
        Source(delay, num_pieces),
        Patience(max_overtakes, max_seconds=1e9),
        num_blocks=num_blocks,
        scheduling_policy=policy,
        max_num_seqs=max_num_seqs,
    )
    requests = [
        make_request(
            f"r{i}",
            [(i + at) % 7 for at in range(prompt)],
            max_tokens=output,
            adapter=None if adapter is None else key(adapter),
            priority=priority,
            arrived_at=float(step),
        )
        for i, (step, adapter, prompt, output, _, priority) in enumerate(arrivals)
    ]
    for step in range(3000):
        for request, (at, *_, aborted, _priority) in zip(requests, arrivals, strict=True):
            if at == step:
                engine.add(request)
            if aborted is not None and at + aborted == step:
                engine.engine.abort(request.id)
        engine.step()
        check_blocks(engine.engine.blocks, requests)
        if step > 15 and not engine.engine.busy:
            break
    else:
        raise AssertionError("a request starves")
    for request, (*_, aborted, _priority) in zip(requests, arrivals, strict=True):
        expected = solo_run(request)
        got = engine.engine.outputs[request.id]
        assert got == expected or (aborted is not None and got == expected[: len(got)])
        assert request.adapter_slot == 0


def test_others_pass_while_an_adapter_is_read_and_copied() -> None:
    engine = AdapterEngine(2, Source(delay=5, num_pieces=3))
    engine.add(make_request("base", range(5), max_tokens=20))
    engine.step()
    engine.add(make_request("tuned", range(5), adapter=key(0), arrived_at=1.0))
    engine.add(make_request("late", range(5), arrived_at=2.0))
    plans = [{row.request_id for row in engine.step().rows} for _ in range(9)]
    assert all({"base", "late"} & plan for plan in plans)
    assert all("late" in plan for plan in plans[:7])
    assert ["tuned" in plan for plan in plans] == [False] * 8 + [True]  # asked for; six looks, three pieces


def test_slots_are_filled_in_the_order_in_which_they_were_given() -> None:
    source = Source(num_pieces=12)
    engine = AdapterEngine(2, source)
    engine.add(make_request("base", range(5), max_tokens=100))
    engine.add(make_request("first", range(4), max_tokens=1, adapter=key(0), arrived_at=1.0))
    for name, adapter, at in (("second", 1, 2.0), ("third", 2, 3.0)):
        for _ in range(6):
            engine.step()
        engine.add(make_request(name, range(4), max_tokens=3, adapter=key(adapter), arrived_at=at))
        engine.step()  # the second is being copied to slot 2 when the third gets slot 1
    started = [row.request_id for _ in range(60) for row in engine.step().rows if row.fresh]
    assert started == ["second", "third"]


def test_what_is_read_for_nobody_any_more_is_forgotten() -> None:
    engine = AdapterEngine(1, Source(delay=1000))
    for i in range(4):
        engine.add(make_request(f"r{i}", range(4), adapter=key(i), arrived_at=float(i)))
        engine.step()
        engine.step()
        engine.engine.abort(f"r{i}")
    assert set(engine.source.looks) == {key(3)}


def test_a_slot_is_not_closed_against_who_waits_in_front() -> None:
    """Else both would take it from each other for ever, and nothing would be read to its end."""
    engine = AdapterEngine(2, Source(delay=4), Patience(0, max_seconds=1e9))
    engine.add(make_request("base", range(11), max_tokens=4))
    for i, adapter in enumerate((0, 3, 2)):
        engine.add(make_request(f"r{i}", range(8), max_tokens=4, adapter=key(adapter), arrived_at=1.0 + i))
    engine.run()
    assert engine.source.fetched == [key(0), key(3), key(2)]


def test_one_that_waits_for_a_slot_is_overtaken_so_often_and_no_more() -> None:
    """Requests for the one resident adapter keep coming; base requests never wait."""
    engine = AdapterEngine(1, Source(), Patience(3, max_seconds=1e9), num_blocks=1000, max_num_seqs=16, budget=64)
    engine.add(make_request("first", range(4), max_tokens=6, adapter=key(0)))
    for _ in range(3):
        engine.step()
    engine.add(make_request("other", range(4), max_tokens=6, adapter=key(1), arrived_at=0.5))
    started: list[str] = []
    for step in range(60):
        engine.add(make_request(f"same{step:02}", [1, 2], max_tokens=6, adapter=key(0), arrived_at=1.0 + step))
        engine.add(make_request(f"base{step:02}", [1, 2], max_tokens=2, arrived_at=1.5 + step))
        plan = engine.step()
        started += [row.request_id for row in plan.rows if row.fresh]
        assert f"base{step:02}" in started, "a request without an adapter waits"
        if "other" in started:
            break
    assert started.index("other") < 40
    assert sum(name.startswith("same") for name in started[: started.index("other")]) == 3
    engine.run()


def test_adapters_take_turns_without_thrashing() -> None:
    """Those that wait get the slot in their order; requests of one adapter that wait together share it."""
    source = Source()
    engine = AdapterEngine(1, source, Patience(16, max_seconds=1e9))
    for i in range(12):
        engine.add(make_request(f"r{i:02}", range(4), max_tokens=3, adapter=key(i % 3), arrived_at=float(i)))
    engine.run()
    assert source.fetched == [key(0), key(1), key(2)]


def test_the_least_recently_used_adapter_gives_way_and_one_without_a_name_first() -> None:
    source = Source()
    engine = AdapterEngine(3, source)
    for i, name in enumerate("abc"):
        engine.add(make_request(name, range(4), max_tokens=2, adapter=key(i)))
        engine.run()
    engine.add(make_request("again", range(4), max_tokens=2, adapter=key(0)))
    engine.run()
    engine.add(make_request("d", range(4), max_tokens=2, adapter=key(3)))
    engine.run()
    assert set(engine.slots.resident) == {key(0), key(2), key(3)}
    source.dead.add(key(0))
    engine.add(make_request("e", range(4), max_tokens=2, adapter=key(4)))
    engine.run()
    assert set(engine.slots.resident) == {key(2), key(3), key(4)}
    assert source.fetched == [key(0), key(1), key(2), key(3), key(4)]
    assert engine.slots.evictions_total == 1  # who has no name any more has nothing to lose
    assert engine.slots.load_seconds.cumulative()[-1] == ("+Inf", 5)


def test_a_request_whose_adapter_cannot_be_read_ends_and_frees_the_slot() -> None:
    source = Source(broken={key(0)})
    engine = AdapterEngine(1, source)
    engine.add(make_request("broken", range(4), adapter=key(0)))
    engine.add(make_request("whole", range(4), adapter=key(1), arrived_at=1.0))
    engine.run()
    assert engine.engine.outputs["broken"] == []
    assert len(engine.engine.outputs["whole"]) == 8
