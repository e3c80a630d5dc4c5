"""The one table that a run prints."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from gpu.results import SectionReport

__all__ = ["show"]


def show(reports: Iterable[SectionReport], title: str) -> None:
    """Print all results, with targets beside figures."""
    table = Table(*("section", "what", "figures", "target", "", "note"), title=title)
    for report in reports:
        for i, result in enumerate(report.results):
            table.add_row(
                report.name if i == 0 else "",
                result.what,
                ", ".join(f"{value:.4g} {name}" for name, value in result.figures.items()),
                ", ".join(map(str, result.targets)),
                result.verdict,
                result.note,
            )
        if report.state != "done":
            table.add_row(report.name, "", "", "", report.state, report.note)
        table.add_section()
    Console(width=None if sys.stdout.isatty() else 200).print(table)
