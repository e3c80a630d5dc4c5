"""``jaxserve train-draft``: train what guesses tokens ahead, for ``--speculative-model``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from jaxserve import logging
from jaxserve.cli.arguments import add_flags, flags_of
from jaxserve.cli.settings import add_engine_flags, configs, given
from jaxserve.errors import ConfigError
from jaxserve.training.options import TrainOptions

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "train-draft", help="train what guesses tokens ahead of a model", description=__doc__
    )
    add_flags(parser, TrainOptions.title, flags_of(TrainOptions))
    add_engine_flags(parser)
    parser.add_argument("data", metavar="DATA", help='JSON lines with "prompt", "text" or "messages".')
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Train, or go on with a training that was stopped; print how often the heads are right."""
    options = TrainOptions(**given(args, flags_of(TrainOptions)))
    config, _ = configs(args, server=False)
    for name in ("speculative_model", "spec_model", "spec_method", "speculative_config"):
        if getattr(config.speculative, name) is not None:
            raise ConfigError(f"{name} has no effect on a training.", name)
    logging.setup("warning")

    from jaxserve.training.run import train_draft

    train_draft(config, Path(args.data), options, print)
    return 0
