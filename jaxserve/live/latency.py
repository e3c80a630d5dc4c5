"""What clients wait for, while somebody looks: for the first token, and between tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

__all__ = ["Latency", "percentiles"]

_WINDOW_SECONDS = 60.0
_MAX_SAMPLES = 2000

_Samples = deque[tuple[float, float]]


class Latency:
    """The samples of the last minute, at most 2,000 of a kind. Belongs to one thread."""

    def __init__(self) -> None:
        self._ttft: _Samples = deque(maxlen=_MAX_SAMPLES)
        self._itl: _Samples = deque(maxlen=_MAX_SAMPLES)

    def note_first(self, seconds: float, now: float) -> None:
        """A completion has its first token so long after it arrived; ``now`` is ``time.monotonic()``."""
        self._ttft.append((now, seconds))

    def note_next(self, num_tokens: int, seconds: float, now: float) -> None:
        """It has so many more tokens, so long after those before: each counts with the mean gap."""
        self._itl.extend([(now, seconds / num_tokens)] * num_tokens)

    def recent(self, now: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Times to first tokens, and between tokens, in seconds."""
        return _recent(self._ttft, now), _recent(self._itl, now)


def percentiles(samples: Sequence[float]) -> dict[str, float | int | None]:
    """The 50th, 90th and 99th percentile of samples, None where there is none, and how many there are."""
    if not samples:
        return {"p50": None, "p90": None, "p99": None, "count": 0}
    p50, p90, p99 = (round(float(value), 6) for value in np.percentile(samples, (50, 90, 99)))
    return {"p50": p50, "p90": p90, "p99": p99, "count": len(samples)}


def _recent(samples: _Samples, now: float) -> tuple[float, ...]:
    while samples and samples[0][0] < now - _WINDOW_SECONDS:
        samples.popleft()
    return tuple(seconds for _, seconds in samples)
