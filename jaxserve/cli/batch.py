"""``jaxserve run-batch``: answer a file of requests, in OpenAI's batch format."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

from jaxserve import logging
from jaxserve.cli.arguments import add_flags, flags_of
from jaxserve.cli.settings import add_engine_flags, configs, given
from jaxserve.config import EngineConfig, ServerConfig
from jaxserve.errors import ConfigError

__all__ = ["add_parser", "run"]

_OF_THE_MODEL = frozenset(
    {
        "enable_auto_tool_choice",
        "log_level",
        "pooling",
        "reasoning_parser",
        "served_model_name",
        "strict_params",
        "tool_call_parser",
        "trust_request_chat_template",
    }
)
"""Settings of a server that matter where nobody connects to it."""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser("run-batch", help="answer a file of requests", description=__doc__)
    parser.add_argument("-i", "--input-file", metavar="FILE", required=True, help="JSON lines: custom_id, url, body.")
    parser.add_argument("-o", "--output-file", metavar="FILE", required=True, help="Gets a line for each.")
    parser.add_argument(
        "--max-concurrency", metavar="INT", type=int, default=256, help="Requests under way at once (default: 256)."
    )
    add_engine_flags(parser)
    add_flags(parser, ServerConfig.title, [flag for flag in flags_of(ServerConfig) if flag.name in _OF_THE_MODEL])
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Answer all; the code is 1 if a line failed."""
    source, target = Path(args.input_file), Path(args.output_file)
    if not source.is_file():
        raise ConfigError(f"input_file {args.input_file!r} is no file.", "input_file")
    if not target.parent.is_dir():
        raise ConfigError(f"output_file {args.output_file!r} is in no folder that exists.", "output_file")
    if args.max_concurrency < 1:
        raise ConfigError(f"max_concurrency must be at least 1, got {args.max_concurrency}.", "max_concurrency")
    engine_config, _ = configs(args, server=False)
    flags = [flag for flag in flags_of(ServerConfig) if flag.name in _OF_THE_MODEL]
    server_config = ServerConfig(**given(args, flags), access_log=False)
    logging.setup(server_config.log_level)
    return asyncio.run(_run(engine_config, server_config, source, target, args.max_concurrency))


async def _run(engine_config: EngineConfig, config: ServerConfig, source: Path, target: Path, concurrency: int) -> int:
    from tqdm import tqdm

    from jaxserve.engine import AsyncLLM
    from jaxserve.server import create_app
    from jaxserve.server.batch import run_batch

    engine = AsyncLLM.from_config(engine_config)
    app = create_app(engine, config)
    try:
        with tqdm(unit=" requests", disable=not sys.stderr.isatty()) as bar:

            def progress(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            report = await run_batch(app, source, target, concurrency=concurrency, progress=progress)
    finally:
        app.state.intake.close()
        await engine.shutdown(0.0)
    resumed = f", {report.resumed} were there before" if report.resumed else ""
    print(f"{report.answered} answered{resumed}, {report.failed} of them failed: {target}")
    return 1 if report.failed else 0
