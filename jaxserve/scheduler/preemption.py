"""Who gives way when blocks run out.

A preempted request loses its blocks and recomputes what it had. What that costs depends on the prefix cache: published
blocks stay findable after they are released, until they are handed out again. The pool hands out a victim's unpublished
blocks first, then its published ones from the tail. So the estimate of the tokens to recompute is

    computed - block_size * (published blocks - those of them that are handed out at once)

It leaves out that others may evict more before the victim is back, and that blocks shared with others stay in any case.
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxserve.blocks import BlockManager
from jaxserve.request import Request
from jaxserve.scheduler.queue import Rank, RankOf

__all__ = ["choose_victim", "may_end_in_flight", "recompute_cost"]


def may_end_in_flight(request: Request) -> bool:
    """Whether tokens that are being sampled end the request by its length, if all their drafts are right."""
    return request.target >= request.max_total


def recompute_cost(request: Request, num_needed: int, blocks: BlockManager) -> int:
    """Estimate of the tokens that ``request`` must recompute if it is preempted for ``num_needed`` blocks."""
    private = len(request.blocks) - request.published
    kept = request.published - max(0, num_needed - private)
    return request.computed - blocks.block_size * max(0, kept)


def choose_victim(candidates: Iterable[Request], num_needed: int, blocks: BlockManager, rank: RankOf) -> Request | None:
    """The request of the least urgent class that is cheapest to recompute, of equal ones the latest; None if none may.

    A request that can finish within the blocks that it has is spared: it soon gives them back by itself.
    """

    def order(request: Request) -> tuple[int, int, Rank]:
        return rank(request)[0], -recompute_cost(request, num_needed, blocks), rank(request)

    return max((request for request in candidates if not _can_finish(request, blocks)), key=order, default=None)


def _can_finish(request: Request, blocks: BlockManager) -> bool:
    # The last token is sampled but never computed, so it needs no place.
    return blocks.missing(request, request.max_total - 1) == 0
