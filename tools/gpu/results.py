"""What a section finds, line by line: figures beside their targets, and checks that pass or do not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = ["Result", "SectionReport", "Target"]


class Target(NamedTuple):
    """What a figure should be. A target that is missed is shown; it is no error."""

    figure: str
    least: float = -math.inf
    most: float = math.inf

    def __str__(self) -> str:
        bound = f"≥ {self.least:g}" if math.isfinite(self.least) else f"≤ {self.most:g}"
        return f"{bound} {self.figure}"


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table.

    Attributes:
        what: what was looked at.
        figures: unit (with what it is of, where that is not plain) -> number.
        targets: what some of the figures should be.
        correct: of a check, whether it passed; None of a measurement.
        note: anything else that is to be known.
    """

    what: str
    figures: Mapping[str, float] = field(default_factory=dict)
    targets: tuple[Target, ...] = ()
    correct: bool | None = None
    note: str = ""

    @property
    def missed(self) -> tuple[Target, ...]:
        """Targets that the figures miss; NaN misses all."""
        return tuple(t for t in self.targets if not t.least <= self.figures.get(t.figure, math.nan) <= t.most)

    @property
    def verdict(self) -> str:
        """One word; empty where nothing was asked."""
        if self.correct is not None:
            return "ok" if self.correct else "WRONG"
        return "" if not self.targets else "missed" if self.missed else "met"


@dataclass(slots=True)
class SectionReport:
    """What became of a section.

    Attributes:
        name: which.
        state: done, skipped or failed.
        seconds: it took.
        note: why it was skipped or how it failed.
        results: what it found, up to there.
    """

    name: str
    state: str = "done"
    seconds: float = 0.0
    note: str = ""
    results: list[Result] = field(default_factory=list)

    @property
    def faults(self) -> list[str]:
        """What is wrong, named: checks that did not pass, and the section itself if it failed."""
        wrong = [f"{self.name}: {result.what}" for result in self.results if result.correct is False]
        return wrong + ([f"{self.name}: {self.note}"] if self.state == "failed" else [])

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        lines = [
            {
                "what": result.what,
                "figures": {name: value if math.isfinite(value) else None for name, value in result.figures.items()},
                "targets": [str(target) for target in result.targets],
                "verdict": result.verdict,
                "note": result.note,
            }
            for result in self.results
        ]
        return {
            "name": self.name,
            "state": self.state,
            "seconds": self.seconds,
            "note": self.note,
            "results": lines,
        }
