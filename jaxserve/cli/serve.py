"""``jaxserve serve``: load a model and serve it over HTTP."""

from __future__ import annotations

import argparse
from typing import Any

from jaxserve import logging
from jaxserve.cli.settings import add_engine_flags, add_server_flags, configs

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser("serve", help="serve a model over HTTP, like OpenAI's API", description=__doc__)
    add_engine_flags(parser)
    add_server_flags(parser)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal comes."""
    engine_config, server_config = configs(args, server=True)
    logging.setup(server_config.log_level)

    from jaxserve.server import bind, run_server

    # A port that is taken is found out before minutes go into loading.
    with bind(server_config) as sock:
        from jaxserve.engine import AsyncLLM

        run_server(AsyncLLM.from_config(engine_config), server_config, sock)
    return 0
