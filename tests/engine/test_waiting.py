"""How much may wait."""

from __future__ import annotations

import pytest

from jaxserve.config import EngineConfig, SchedulerConfig
from jaxserve.engine.waiting import WaitingLimits
from jaxserve.errors import ConfigError, QueueFullError


def test_tokens_of_what_waits_are_limited() -> None:
    limits = WaitingLimits(SchedulerConfig(max_num_queued_tokens=100), max_rows=2)
    limits.check(0, [(1, 500), (1, 500)])  # these run
    limits.check(1, [(1, 500), (1, 99)])
    limits.check(0, [(1, 500), (1, 500), (1, 40), (1, 59)])
    with pytest.raises(QueueFullError, match=r"^101 prompt tokens are waiting; .* 100 \(--max-num") as hit:
        limits.check(0, [(1, 500), (1, 500), (1, 41), (1, 60)])
    assert hit.value.limit == "max_num_queued_tokens"
    # Completions of one prompt wait together; the engine may run fewer than it has rows for.
    with pytest.raises(QueueFullError, match="160 prompt tokens"):
        limits.check(3, [(1, 500), (2, 100), (1, 60)])


def test_the_number_of_what_waits_is_limited() -> None:
    limits = WaitingLimits(SchedulerConfig(max_num_queued_reqs=3), max_rows=2)
    limits.check(2, [(4, 0)])
    for num_queued, opened in ((3, [(1, 0)]), (0, [(4, 0), (1, 0)])):
        with pytest.raises(QueueFullError, match=r"^3 requests are waiting; the limit is 3 \(--max-num-queued-reqs\)"):
            limits.check(num_queued, opened)
    WaitingLimits(SchedulerConfig(), max_rows=2).check(10**6, [(10**6, 10**6)])


def test_who_is_refused_hears_how_long_an_end_takes() -> None:
    limits = WaitingLimits(SchedulerConfig(max_num_queued_reqs=1), max_rows=1)
    for _ in range(100):
        limits.note_end()
    with pytest.raises(QueueFullError) as hit:
        limits.check(1, [])
    assert 0 < hit.value.retry_after < 0.1


def test_negative_limits_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_num_queued_tokens"):
        EngineConfig.from_flat({"max_num_queued_tokens": -1})
