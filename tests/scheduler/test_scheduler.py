"""What a plan holds, and what becomes of its result."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest

from jaxserve.errors import RequestError
from jaxserve.plan import DEVICE_TOKEN, RowPlan, StepPlan, StepResult, TokenLogprobs
from jaxserve.request import FinishReason, Request
from tests.property.simulated import Engine, make_request, make_scheduler, shares, solo_run


def result(plan: StepPlan, *tokens: tuple[int, ...]) -> StepResult:
    return StepResult(tokens, (None,) * len(plan.rows))


def test_a_request_is_planned_as_a_fresh_row_and_then_token_by_token() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [5, 6, 7], seed=11))
    first = scheduler.plan().rows[0]
    assert (first.start, first.num_tokens, first.tokens, first.samples, first.fresh) == (0, 3, (5, 6, 7), True, True)
    assert (first.history, first.num_prompt, first.seed, first.num_drafts) == ((5, 6, 7), 3, 11, 0)
    second = scheduler.plan().rows[0]
    assert (second.start, second.num_tokens, second.tokens) == (3, 1, (DEVICE_TOKEN,))
    assert (second.samples, second.fresh, second.history) == (True, False, ())
    assert len(second.block_ids) * 4 >= 4


def test_without_overlap_the_newest_token_is_known() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [5, 6, 7]))
    plan = scheduler.plan()
    (event,) = scheduler.update(plan, result(plan, (9,)))
    assert (event.token_ids, event.finish) == ((9,), None)
    assert scheduler.plan().rows[0].tokens == (9,)


def test_a_long_prompt_runs_in_chunks_and_samples_only_after_the_last() -> None:
    scheduler = make_scheduler(budget=4)
    scheduler.add(make_request("a", range(10)))
    rows: list[RowPlan] = []
    for _ in range(3):
        plan = scheduler.plan()
        rows += plan.rows
        scheduler.update(plan, result(plan, (9,) if plan.rows[0].samples else ()))
    assert [(row.start, row.num_tokens, row.samples, row.fresh) for row in rows] == [
        (0, 4, False, True),
        (4, 4, False, False),
        (8, 2, True, False),
    ]


def test_a_long_prompt_leaves_a_token_to_each_request_behind_it() -> None:
    scheduler = make_scheduler(budget=8, scheduling_policy="priority")
    for i in range(2):
        scheduler.add(make_request(f"decode{i}", [i], priority=1, max_tokens=20))
    first = scheduler.plan()
    scheduler.add(make_request("long", range(40), priority=0))
    plan = scheduler.plan()
    assert shares(plan) == {"decode0": 1, "decode1": 1, "long": 6}
    scheduler.update(first, result(first, (3,), (3,)))
    assert shares(scheduler.plan()) == {"long": 6, "decode0": 1, "decode1": 1}


def test_the_long_prompt_threshold_caps_a_chunk_only_beside_others() -> None:
    scheduler = make_scheduler(budget=16, long_prefill_token_threshold=5)
    scheduler.add(make_request("a", range(40)))
    assert shares(scheduler.plan()) == {"a": 16}
    scheduler.add(make_request("b", range(30, 60), arrived_at=1.0))
    assert shares(scheduler.plan()) == {"a": 5, "b": 5}


def test_without_chunks_a_prompt_waits_for_a_step_that_holds_it_whole() -> None:
    scheduler = make_scheduler(budget=16, enable_chunked_prefill=False, caching=False)
    scheduler.add(make_request("a", range(10)))
    scheduler.add(make_request("b", range(10), arrived_at=1.0))
    plan = scheduler.plan()
    assert shares(plan) == {"a": 10}
    assert shares(scheduler.plan()) == {"a": 1, "b": 10}


def test_without_chunks_a_prompt_larger_than_a_step_is_refused_with_both_numbers() -> None:
    scheduler = make_scheduler(budget=64, enable_chunked_prefill=False)
    with pytest.raises(RequestError, match=r"prompt has 200 tokens.*max_num_batched_tokens \(64\)") as error:
        scheduler.add(make_request("a", range(200)))
    assert error.value.param == "prompt"
    assert not scheduler.has_work


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [([], 4, "prompt has 0 tokens"), (list(range(39)), 4, "need 11 KV blocks; there are 10")],
)
def test_what_can_never_run_is_refused(prompt: list[int], max_tokens: int, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make_scheduler(num_blocks=11).add(make_request("a", prompt, max_tokens=max_tokens))


def test_a_request_that_just_fills_the_pool_runs() -> None:
    engine = Engine(make_scheduler(num_blocks=11))
    request = make_request("a", range(37), max_tokens=4)
    engine.add(request)
    engine.run()
    assert engine.outputs["a"] == solo_run(request)


def test_an_id_is_refused_while_it_is_in_use() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1]))
    with pytest.raises(RequestError, match="'a' is in use"):
        scheduler.add(make_request("a", [2]))


def test_a_request_is_not_planned_beyond_its_length() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2], max_tokens=2))
    first, second = scheduler.plan(), scheduler.plan()
    assert not scheduler.update(first, result(first, (5,)))[0].finish
    assert not scheduler.plan()
    (event,) = scheduler.update(second, result(second, (6,)))
    assert event.finish is FinishReason.LENGTH
    assert not scheduler.has_work


@pytest.mark.parametrize(("token", "reported"), [(7, 7), (8, None)])
def test_a_stop_token_ends_the_output_and_only_an_asked_one_is_the_reason(token: int, reported: int | None) -> None:
    scheduler = make_scheduler()
    request = make_request("a", [1, 2], stop_ids=(7, 8))
    request.params = dataclasses.replace(request.params, stop_token_ids=(7,))
    scheduler.add(request)
    plan = scheduler.plan()
    (event,) = scheduler.update(plan, result(plan, (token,)))
    assert (event.token_ids, event.finish, event.stop_reason) == ((token,), FinishReason.STOP, reported)


def test_the_token_in_flight_of_a_stopped_request_is_dropped() -> None:
    scheduler = make_scheduler()
    request = make_request("a", [1, 2], stop_ids=(7,))
    scheduler.add(request)
    first, second = scheduler.plan(), scheduler.plan()
    assert scheduler.update(first, result(first, (7,)))[0].finish is FinishReason.STOP
    assert scheduler.update(second, result(second, (3,))) == []
    assert request.output == [7]


def test_several_tokens_of_a_row_are_cut_at_the_one_that_ends_it() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2], stop_ids=(7,)))
    plan = scheduler.plan()
    logprobs = tuple(TokenLogprobs(-float(i), 1, ()) for i in range(3))
    (event,) = scheduler.update(plan, StepResult(((5, 7, 6),), (logprobs,)))
    assert (event.token_ids, event.logprobs) == ((5, 7), logprobs[:2])
    assert scheduler.generation_tokens_total == 2


def test_an_aborted_request_leaves_nothing_behind_whatever_its_state() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    running, waiting = make_request("a", range(9)), make_request("b", range(9), arrived_at=1.0)
    scheduler.add(running)
    scheduler.add(waiting)
    plan = scheduler.plan()
    for request in (running, waiting):
        event = scheduler.abort(request.id)
        assert event is not None
        assert (event.request_id, event.finish) == (request.id, FinishReason.ABORT)
    assert scheduler.abort("a") is None
    assert not scheduler.has_work
    assert scheduler.blocks.num_free == scheduler.blocks.num_blocks - 1
    assert scheduler.update(plan, result(plan, (3,))) == []


def test_a_new_request_does_not_receive_the_token_of_an_aborted_one_of_its_name() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2]))
    plan = scheduler.plan()
    scheduler.abort("a")
    scheduler.add(make_request("a", [3, 4]))
    assert scheduler.update(plan, result(plan, (9,))) == []
    assert scheduler.plan().rows[0].history == (3, 4)


def test_a_reason_other_than_abort_can_end_a_request() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2]))
    event = scheduler.abort("a", FinishReason.STOP)
    assert event is not None
    assert event.finish is FinishReason.STOP


def test_at_most_one_step_may_be_unsettled_and_steps_settle_in_order() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2]))
    _, second = scheduler.plan(), scheduler.plan()
    with pytest.raises(AssertionError, match="two are in flight"):
        scheduler.plan()
    with pytest.raises(AssertionError, match="before an older one"):
        scheduler.update(second, result(second, (3,)))
    with pytest.raises(AssertionError, match="not in flight"):
        make_scheduler().update(second, result(second, (3,)))


def test_a_failed_step_is_passed_over_once_its_requests_have_ended() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2]))
    scheduler.plan()
    scheduler.abort("a", FinishReason.ERROR)
    scheduler.add(make_request("b", [3, 4]))
    plan = scheduler.plan()
    assert scheduler.update(plan, result(plan, (5,)))[0].request_id == "b"


def test_identical_prompts_of_one_step_share_their_blocks() -> None:
    scheduler = make_scheduler(budget=64)
    engine = Engine(scheduler)
    twins = [make_request(f"r{i}", range(11), arrived_at=float(i), seed=i) for i in range(2)]
    for request in twins:
        engine.add(request)
    first, second = engine.step().rows
    assert second.block_ids[:2] == first.block_ids[:2]
    assert (second.start, second.num_tokens) == (8, 3)
    engine.run()
    assert [engine.outputs[request.id] for request in twins] == [solo_run(request) for request in twins]


def make_family(length: int, n: int) -> list[Request]:
    first = make_request("f0", range(length), seed=0)
    return [first, *(make_request(f"f{i}", range(length), seed=i, fork_of=first) for i in range(1, n))]


@pytest.mark.parametrize("caching", [False, True])
def test_forks_wait_for_the_prompt_and_then_compute_one_token(caching: bool) -> None:
    scheduler = make_scheduler(budget=8, caching=caching)
    engine = Engine(scheduler)
    family = make_family(14, 3)
    for request in family:
        engine.add(request)
    assert shares(engine.step()) == {"f0": 8}
    other = make_request("other", [1], arrived_at=1.0)
    engine.add(other)
    # One token of the budget is left, but the prompt is computed only by this very step.
    assert shares(engine.step()) == {"f0": 6, "other": 1}
    plan = engine.step()
    assert shares(plan) == {"f0": 1, "f1": 1, "f2": 1, "other": 1}
    assert len(plan.copies) == 2
    engine.run()
    for request in [*family, other]:
        assert engine.outputs[request.id] == solo_run(request)
    assert scheduler.prompt_tokens_total == 15


def test_a_fork_whose_sibling_is_gone_computes_its_own_prompt() -> None:
    scheduler = make_scheduler(caching=False)
    engine = Engine(scheduler)
    first, second = make_family(6, 2)
    engine.add(first)
    engine.add(second)
    engine.abort("f0")
    assert shares(engine.step()) == {"f1": 6}
    engine.run()
    assert engine.outputs["f1"] == solo_run(second)


def test_a_fork_waits_for_a_sibling_that_waits_but_not_for_one_that_was_preempted() -> None:
    scheduler = make_scheduler(max_num_seqs=1, caching=False)
    first, second = make_family(6, 2)
    second.arrived_at = -1.0
    scheduler.add(first)
    scheduler.add(second)
    plan = scheduler.plan()
    assert shares(plan) == {"f0": 6}
    scheduler._preempt(first)
    scheduler.update(plan, result(plan, (3,)))
    assert shares(scheduler.plan()) == {"f1": 6}


def test_a_fork_waits_for_a_preempted_sibling_whose_prompt_is_still_to_be_read() -> None:
    scheduler = make_scheduler(budget=4, max_num_seqs=1, caching=False)
    first, second = make_family(6, 2)
    first.params = replace(first.params, prompt_logprobs=1)
    second.arrived_at = -1.0
    scheduler.add(first)
    scheduler.add(second)
    plan = scheduler.plan()
    assert shares(plan) == {"f0": 4}
    scheduler._preempt(first)
    scheduler.update(plan, result(plan, ()))
    assert shares(scheduler.plan()) == {"f0": 4}


def test_rows_are_reused_and_never_exceed_their_number() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    engine = Engine(scheduler)
    for i in range(5):
        engine.add(make_request(f"r{i}", [i, 1], max_tokens=3, arrived_at=float(i)))
    assert scheduler.num_waiting == 5
    engine.step()
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 3)
    engine.run()
    assert {row.row for plan in engine.plans for row in plan.rows} == {0, 1}
    assert scheduler.steps_total == sum(map(bool, engine.plans))


def test_the_more_urgent_request_is_served_first_under_the_priority_policy() -> None:
    scheduler = make_scheduler(max_num_seqs=1, scheduling_policy="priority")
    scheduler.add(make_request("late", [1], priority=1))
    scheduler.add(make_request("soon", [1], priority=0, arrived_at=1.0))
    assert shares(scheduler.plan()) == {"soon": 1}
