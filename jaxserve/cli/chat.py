"""``jaxserve chat``: talk with a model. Ctrl-C stops an answer; /exit, ctrl-D, or ctrl-C at the prompt leaves."""

from __future__ import annotations

import argparse
import asyncio
from contextlib import aclosing
from typing import Any

from jaxserve.cli.backend import Backend, add_backend_flags, open_backend
from jaxserve.cli.settings import sampling
from jaxserve.errors import JaxserveError

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser("chat", help="talk with a model", description=__doc__)
    parser.add_argument("--system-prompt", metavar="TEXT", help="What the model is told first.")
    add_backend_flags(parser)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Read a line, print its answer, and so on."""
    params = sampling(args)
    backend = open_backend(args)
    messages = [] if args.system_prompt is None else [{"role": "system", "content": args.system_prompt}]
    # The runner turns ctrl-C into the cancellation of the answer that runs in it, and nothing else.
    with asyncio.Runner() as runner:
        try:
            while (line := _read_line()) is not None:
                messages.append({"role": "user", "content": line})
                answer: list[str] = []
                try:
                    runner.run(_answer(backend, messages, params, answer))
                except KeyboardInterrupt:
                    print(" [stopped]")
                except JaxserveError as error:
                    print(f"error: {error}")
                    messages.pop()
                    continue
                messages.append({"role": "assistant", "content": "".join(answer)})
        finally:
            runner.run(backend.close())
    return 0


def _read_line() -> str | None:
    """The next line that is not empty; None to leave."""
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return None
        if line == "/exit":
            return None
        if line:
            return line


async def _answer(backend: Backend, messages: list[dict[str, str]], params: dict[str, Any], answer: list[str]) -> None:
    """Print the answer to ``messages`` as it comes, and collect its pieces in ``answer``."""
    async with aclosing(backend.chat(messages, params)) as pieces:
        async for piece in pieces:
            print(piece, end="", flush=True)
            answer.append(piece)
    print()
