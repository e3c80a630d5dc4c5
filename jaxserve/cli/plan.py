"""``jaxserve plan``: will it fit, and how fast can it be? Answered from a model's settings, before weights are read."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from jaxserve import logging
from jaxserve.cli.arguments import add_flags, flags_of, parse_size
from jaxserve.cli.settings import add_engine_flags, configs, given
from jaxserve.sizing import PlanOptions

if TYPE_CHECKING:
    from jaxserve.engine.planning import Plan

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser("plan", help="say whether a model fits, and what would", description=__doc__)
    add_flags(parser, PlanOptions.title, flags_of(PlanOptions))
    add_engine_flags(parser)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Print the plan; 1 if the answer is no."""
    asked = given(args, flags_of(PlanOptions))
    if "gpu" in asked:
        asked["gpu"] = _device(asked["gpu"])
    options, config = PlanOptions(**asked), configs(args, server=False)[0]
    logging.setup("warning")

    from jaxserve.engine.planning import make_plan

    plan = make_plan(config, options, os.environ)
    if options.json:
        print(json.dumps(_record(plan), indent=2))
    else:
        from jaxserve.cli.plan_table import show

        show(plan)
    return 1 if plan.problems else 0


def _device(text: str) -> str:
    """Bytes with a suffix as plain ones; names as they are."""
    try:
        return str(parse_size(text))
    except ValueError:
        return text


def _record(plan: Plan) -> dict[str, Any]:
    """All figures; sums that the table shows are there, too."""
    memory = plan.memory
    record = {"fits": not plan.problems, **asdict(plan)}
    record["memory"] |= {"allocated": memory.allocated, "left": memory.left}
    record["memory"]["workspace"] |= {"num_bytes": memory.workspace.num_bytes}
    return record
