"""What the parts of the design are said to gain, or not to cost: each switched off and on."""

from __future__ import annotations

from jaxserve.bench.claims.claim import Check, Claim, Figure, Outcome, Sizes
from jaxserve.bench.claims.picture import show
from jaxserve.bench.claims.registry import CLAIMS, FULL, QUICK
from jaxserve.bench.claims.run import check_claims, choose, report

__all__ = [
    "CLAIMS",
    "FULL",
    "QUICK",
    "Check",
    "Claim",
    "Figure",
    "Outcome",
    "Sizes",
    "check_claims",
    "choose",
    "report",
    "show",
]
