"""How much may wait before new requests are refused, and when a place is likely to be free.

Requests on their way to the engine count as well as those in its queue: many may come while it computes one step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from jaxserve.config import SchedulerConfig
from jaxserve.errors import QueueFullError

__all__ = ["WaitingLimits"]


class WaitingLimits:
    """The limits of one engine, of which ``max_rows`` requests run at once.

    Attributes:
        seconds_per_end: what passes between the ends of requests lately; a place in the queue is free at each.
    """

    def __init__(self, config: SchedulerConfig, max_rows: int) -> None:
        self._config = config
        self._max_rows = max_rows
        self.seconds_per_end = 1.0
        self._newest = time.monotonic()

    def note_end(self) -> None:
        """A request has ended."""
        now = time.monotonic()
        self.seconds_per_end += 0.1 * (min(now - self._newest, 60.0) - self.seconds_per_end)
        self._newest = now

    def check(self, num_queued: int, opened: Sequence[tuple[int, int]]) -> None:
        """QueueFullError: no more may wait.

        Args:
            num_queued: completions that wait in the engine.
            opened: of every open request the number of completions and of prompt tokens, the newest last; 0 tokens are
                not known yet.
        """
        config = self._config
        waiting = max(num_queued, sum(n for n, _ in opened) - self._max_rows)
        if 0 < config.max_num_queued_reqs <= waiting:
            self._refuse(f"{waiting} requests are", "max_num_queued_reqs", config.max_num_queued_reqs)
        if config.max_num_queued_tokens:
            tokens = _tokens_of_newest(waiting, opened)
            if tokens >= config.max_num_queued_tokens:
                self._refuse(f"{tokens} prompt tokens are", "max_num_queued_tokens", config.max_num_queued_tokens)

    def _refuse(self, what: str, name: str, limit: int) -> None:
        flag = name.replace("_", "-")
        raise QueueFullError(
            f"{what} waiting; the limit is {limit} (--{flag}).", retry_after=self.seconds_per_end, limit=name
        )


def _tokens_of_newest(waiting: int, opened: Sequence[tuple[int, int]]) -> int:
    """Prompt tokens of the requests that wait: the newest ones."""
    total = 0
    for n, num_tokens in reversed(opened):
        if waiting <= 0:
            break
        total += num_tokens
        waiting -= n
    return total
