"""The ``jaxserve`` command. Heavy modules are imported by the subcommand that needs them, so that help is quick."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jaxserve import __version__
from jaxserve.cli import batch, bench, chat, collect_env, complete, plan, serve, train
from jaxserve.cli.arguments import Parser
from jaxserve.errors import ConfigError, JaxserveError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code is 0, 1 (it failed) or 2 (it was called wrongly)."""
    parser = Parser(prog="jaxserve", description="Serve and run large language models on JAX.")
    parser.add_argument("--version", action="version", version=f"jaxserve {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (serve, plan, complete, chat, batch, bench, train, collect_env):
        command.add_parser(subparsers)
    args = parser.parse(argv)
    try:
        return int(args.run(args))
    except ConfigError as error:
        return _fail(error.as_typed(), 2)
    except JaxserveError as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        return 130


def _fail(message: str, code: int) -> int:
    print(f"jaxserve: error: {' '.join(message.split())}", file=sys.stderr)
    return code
