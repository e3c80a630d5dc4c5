"""A plan in the making."""

from __future__ import annotations

from jaxserve.scheduler.step import StepBuilder
from tests.property.simulated import make_request


def test_nothing_of_a_request_that_this_step_admits_counts_as_written() -> None:
    # Its prefix may lie in blocks that another row of the same step writes; block copies run before that.
    request = make_request("resumed", range(10))
    request.computed, request.blocks = 8, [1, 2, 3]
    step = StepBuilder(budget=16)
    step.add(request, 2, fresh=True)
    assert step.computed_before(request) == 0


def test_of_a_running_request_what_earlier_steps_computed_counts_as_written() -> None:
    request = make_request("running", range(10))
    request.computed, request.blocks = 4, [1, 2, 3]
    step = StepBuilder(budget=16)
    step.add(request, 4, fresh=False)
    assert (step.computed_before(request), request.computed) == (4, 8)
