"""Both policies order requests, through one interface."""

from __future__ import annotations

import pytest

from jaxserve.scheduler import RequestQueue, fcfs, priority
from tests.property.simulated import make_request

A = make_request("a", [1], arrived_at=1.0, priority=5)
B = make_request("b", [1], arrived_at=2.0, priority=0)
C = make_request("c", [1], arrived_at=3.0, priority=5)
TWIN = make_request("a2", [1], arrived_at=1.0, priority=5)


@pytest.mark.parametrize(("rank", "order"), [(fcfs, [A, TWIN, B, C]), (priority, [B, A, TWIN, C])])
def test_requests_come_in_order_of_rank(rank, order) -> None:  # type: ignore[no-untyped-def]
    queue = RequestQueue(rank)
    for request in (C, TWIN, B, A):
        queue.add(request)
    assert list(queue) == order
    assert len(queue) == 4


def test_a_request_that_comes_back_goes_before_later_ones() -> None:
    queue = RequestQueue(fcfs)
    for request in (A, B, C):
        queue.add(request)
    queue.remove(B)
    assert B not in queue
    queue.add(B)
    assert list(queue) == [A, B, C]


def test_removing_what_is_not_there_is_refused() -> None:
    queue = RequestQueue(fcfs)
    queue.add(A)
    with pytest.raises(KeyError):
        queue.remove(B)
    assert A in queue
