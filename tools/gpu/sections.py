"""Runs sections in order of value. One that the clock has no time for is skipped, one that fails stops no other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from gpu.results import Result, SectionReport
from gpu.session import Session, short

__all__ = ["Section", "run_sections"]


class Section(NamedTuple):
    """A question.

    Attributes:
        name: of one or two words.
        needs: seconds without which it is not begun.
        run: finds results, one by one; what it has found counts even if it fails later.
    """

    name: str
    needs: float
    run: Callable[[Session], Iterable[Result]]


def run_sections(sections: Sequence[Section], session: Session, tell: Callable[[str], None]) -> Iterator[SectionReport]:
    """Run sections and report on each when it has ended; ``tell`` hears of every result at once."""
    for section in sections:
        report = SectionReport(section.name)
        if session.clock.left < section.needs:
            report.state = "skipped"
            report.note = f"it needs {section.needs:.0f} s, and {max(session.clock.left, 0):.0f} s are left"
        else:
            _run(section, session, report, tell)
        if report.note:
            tell(f"{section.name} {report.state}: {report.note}")
        yield report


def _run(section: Section, session: Session, report: SectionReport, tell: Callable[[str], None]) -> None:
    began = time.monotonic()
    try:
        for result in section.run(session):
            report.results.append(result)
            figures = ", ".join(f"{value:.4g} {name}" for name, value in result.figures.items())
            tell(" ".join(filter(None, (f"{section.name}: {result.what}:", figures, result.verdict, result.note))))
    except Exception as error:  # whatever it is, the other sections have their own to tell
        report.state, report.note = "failed", short(error)
    report.seconds = time.monotonic() - began
