"""Outcomes of claims as tables and bars, on the terminal or as SVG."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxserve.bench.claims.claim import Figure, Outcome
from jaxserve.bench.machine import FOREIGN_LIMIT, foreign_text

__all__ = ["show"]

_BAR = 40
"""Characters of the longest bar."""


def show(outcomes: Sequence[Outcome], console: Console) -> None:
    """Print a table of each claim's figures, bars of its first one, and what holds."""
    for outcome in outcomes:
        claim = outcome.claim
        runs = len(outcome.repeats[claim.on])
        console.print()
        console.print(Text(f"{claim.name}: {claim.title} ({'one run' if runs == 1 else f'median of {runs}'})", "bold"))
        console.print(_table(outcome))
        console.print(_bars(outcome, claim.figures[0]))
        for check in outcome.checks:
            console.print(
                Text("  holds  " if check.holds else "  FAILS  ", "green" if check.holds else "red") + check.text
            )
        style = "red" if (outcome.foreign or 0.0) > FOREIGN_LIMIT else "dim"
        console.print(Text(f"  {foreign_text(outcome.foreign)}", style))


def _table(outcome: Outcome) -> Table:
    table = Table()
    table.add_column("")
    for way in outcome.medians:
        table.add_column(way, justify="right")
    table.add_column("ratio", justify="right")
    measured = outcome.medians[outcome.claim.off]
    for figure in (figure for figure in outcome.claim.figures if figure.key in measured):
        off, on = (figures[figure.key] for figures in outcome.medians.values())
        label = f"{figure.key}, {figure.unit}" if figure.unit else figure.key
        ratio = f"{on / off:.2f}" if off else ""
        table.add_row(label, f"{off:.{figure.digits}f}", f"{on:.{figure.digits}f}", ratio)
    return table


def _bars(outcome: Outcome, figure: Figure) -> Text:
    """A bar per way; the baseline is grey, the other one green where it is the better."""
    values = {way: figures[figure.key] for way, figures in outcome.medians.items()}
    off, on = values.values()
    better = on > off if figure.more_is_better else on < off
    longest, width = max(*values.values(), 1e-9), max(map(len, values))
    text = Text()
    text.append(f"  {figure.key}{f' ({figure.unit})' if figure.unit else ''}\n", "bold")
    for (way, value), style in zip(values.items(), ("bright_black", "green" if better else "red"), strict=True):
        text.append(f"  {way:<{width}} ")
        text.append("█" * max(1, round(_BAR * value / longest)), style)
        text.append(f" {value:.{figure.digits}f}\n")
    text.rstrip()
    return text
