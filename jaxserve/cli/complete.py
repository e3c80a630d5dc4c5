"""``jaxserve complete``: continue one text, and print what comes."""

from __future__ import annotations

import argparse
import asyncio
from contextlib import aclosing
from typing import Any

from jaxserve.cli.backend import Backend, add_backend_flags, open_backend
from jaxserve.cli.settings import sampling

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser("complete", help="continue a text", description=__doc__)
    parser.add_argument("--prompt", metavar="TEXT", required=True, help="The text to continue.")
    add_backend_flags(parser)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Print one completion."""
    params = sampling(args)
    asyncio.run(_complete(open_backend(args), args.prompt, params))
    return 0


async def _complete(backend: Backend, prompt: str, params: dict[str, Any]) -> None:
    try:
        async with aclosing(backend.complete(prompt, params)) as pieces:
            async for piece in pieces:
                print(piece, end="", flush=True)
        print()
    finally:
        await backend.close()
