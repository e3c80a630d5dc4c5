"""How long things took, or how many they were: a histogram that is cheap to add to, with Prometheus buckets."""

from __future__ import annotations

from bisect import bisect_left

__all__ = ["ADAPTER_EDGES", "GRAMMAR_EDGES", "STEP_EDGES", "Timings"]

STEP_EDGES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
GRAMMAR_EDGES = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
ADAPTER_EDGES = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Timings:
    """Counts of durations (or numbers) up to each of ``edges`` (ascending), and their sum. Added to by one thread."""

    def __init__(self, edges: tuple[float, ...]) -> None:
        self.edges = edges
        self.total = 0.0
        self._counts = [0] * (len(edges) + 1)

    def add(self, seconds: float) -> None:
        """One more."""
        self._counts[bisect_left(self.edges, seconds)] += 1
        self.total += seconds

    def cumulative(self) -> list[tuple[str, int]]:
        """(edge, how many took at most that long), the last edge being ``+Inf``."""
        found, so_far = [], 0
        for edge, count in zip((*map(str, self.edges), "+Inf"), self._counts, strict=True):
            so_far += count
            found.append((edge, so_far))
        return found
