"""Requests in the order of service.

A policy is a rank: lower is served first. The waiting queue, the list of running requests and the choice of whom to
preempt all use the same rank, so that the first request by rank always moves on and nobody starves: it heads the queue
while it waits, and nobody can take its blocks while it runs. A preempted request needs no special place: its rank puts
it before all that came later.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator

from jaxserve.request import Request

__all__ = ["Rank", "RankOf", "RequestQueue", "fcfs", "priority"]

Rank = tuple[int, float, str]
"""Class (lower first), time of arrival, id."""

RankOf = Callable[[Request], Rank]


def fcfs(request: Request) -> Rank:
    """First come, first served."""
    return 0, request.arrived_at, request.id


def priority(request: Request) -> Rank:
    """Lower ``priority`` first; equal ones as they come."""
    return request.priority, request.arrived_at, request.id


class RequestQueue(Collection[Request]):
    """Requests sorted by rank, which must not change while they are in it.

    Adding and removing cost a binary search and a move of pointers, iterating nothing more than a list does.
    """

    def __init__(self, rank: RankOf) -> None:
        self.rank = rank
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __contains__(self, request: object) -> bool:
        return isinstance(request, Request) and self._find(request) is not None

    def add(self, request: Request) -> None:
        """Put the request at its place."""
        insort(self._requests, request, key=self.rank)

    def remove(self, request: Request) -> None:
        """Take the request out; KeyError if it is not there."""
        index = self._find(request)
        if index is None:
            raise KeyError(request.id)
        del self._requests[index]

    def _find(self, request: Request) -> int | None:
        index = bisect_left(self._requests, self.rank(request), key=self.rank)
        found = index < len(self._requests) and self._requests[index] is request
        return index if found else None
