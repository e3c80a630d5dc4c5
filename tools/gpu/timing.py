"""Measuring time on a device, and compiling many programs at once beforehand."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import jax

__all__ = ["Timing", "in_threads", "measure"]

T = TypeVar("T")


class Timing(NamedTuple):
    """Of one call.

    Attributes:
        seconds: the median.
        spread: the longest less the shortest, as a share of the median.
    """

    seconds: float
    spread: float


def measure(run: Callable[[], Any], *, calls: int = 1, repeats: int = 5) -> Timing:
    """Time ``run``, which does ``calls`` calls on the device, after a first run that does not count.

    The host waits for the device at the end of every repeat only, so that what a wait costs is shared by the calls.
    """
    jax.block_until_ready(run())
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append((time.perf_counter() - began) / calls)
    median = statistics.median(seconds)
    return Timing(median, (max(seconds) - min(seconds)) / median)


def in_threads(jobs: Mapping[str, Callable[[], T]], threads: int) -> dict[str, T | Exception]:
    """Results of jobs by name, or what they raised; XLA compiles without the interpreter's lock."""
    with ThreadPoolExecutor(threads) as pool:
        futures = {name: pool.submit(job) for name, job in jobs.items()}
        done: dict[str, T | Exception] = {}
        for name, future in futures.items():
            try:
                done[name] = future.result()
            except Exception as error:  # one that does not compile says so and keeps no other from it
                done[name] = error
        return done
