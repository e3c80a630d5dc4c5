"""``jaxserve bench``: measure a server, this engine, its start-up, or the claims behind its design."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jaxserve import logging
from jaxserve.bench import options
from jaxserve.cli.arguments import add_flags, flags_of
from jaxserve.cli.settings import add_engine_flags, configs, given
from jaxserve.errors import ConfigError

__all__ = ["add_parser"]


def add_parser(subparsers: Any) -> None:
    """Add the subcommand, and its own ones."""
    parser = subparsers.add_parser(
        "bench", help="measure speed, start-up, and what the design gains", description=__doc__
    )
    commands = parser.add_subparsers(title="measurements", metavar="WHAT", required=True)
    serve = (options.ServeOptions, options.DatasetOptions, options.MetricOptions, options.OutputOptions)
    _add(commands, _serve, "serve", "load any server with OpenAI's API", serve, engine=False)
    offline = (options.DatasetOptions, options.OutputOptions)
    _add(commands, _throughput, "throughput", "generate for a data set offline; --seed picks it", offline)
    batch = (options.LatencyOptions, options.OutputOptions)
    _add(commands, _latency, "latency", "run a fixed batch offline, again and again", batch)
    starts = (options.StartupOptions, options.OutputOptions)
    _add(commands, _startup, "startup", "start with empty and with filled caches, in new processes", starts)
    claims = (
        "what paged KV, continuous batching, prefix caching, chunked prefill, speculation and adapters gain and cost"
    )
    _add(commands, _claims, "claims", claims, (options.ClaimsOptions,))


def _add(
    commands: Any,
    run: Callable[[argparse.Namespace], int],
    name: str,
    help: str,
    parts: Sequence[Any],
    *,
    engine: bool = True,
) -> None:
    parser = commands.add_parser(name, help=help, description=f"{help[0].upper()}{help[1:]}.")
    for part in parts:
        add_flags(parser, part.title, flags_of(part))
    if engine:
        add_engine_flags(parser)
    parser.set_defaults(run=run, parser=parser)


def _part(kind: Any, args: argparse.Namespace) -> Any:
    """Options of one kind from the command line. ConfigError: a value cannot work."""
    return kind(**given(args, flags_of(kind)))


def _serve(args: argparse.Namespace) -> int:
    """1 if every request failed."""
    load, dataset = _part(options.ServeOptions, args), _part(options.DatasetOptions, args)
    metrics = _part(options.MetricOptions, args)
    save = _saver(args)

    from jaxserve.bench.load import load_server
    from jaxserve.bench.records import render

    result = load_server(load, dataset, metrics)
    records = result.pop("records")
    print(render("Serving Benchmark Result", result, metrics))
    how = {name: getattr(load, name) for name in ("base_url", "endpoint", "burstiness", "max_concurrency", "seed")}
    # JSON has no infinity.
    rate = "inf" if load.request_rate == float("inf") else load.request_rate
    save({**how, "request_rate": rate, "dataset_name": dataset.dataset_name, "num_prompts": len(records), **result})
    return 0 if result["completed"] else 1


def _throughput(args: argparse.Namespace) -> int:
    dataset, config = _part(options.DatasetOptions, args), configs(args, server=False)[0]
    save = _saver(args)
    logging.setup("warning")

    from jaxserve.bench.offline import measure_throughput

    result = measure_throughput(config, dataset)
    print(
        f"Throughput: {result['requests_per_second']:.2f} requests/s, "
        f"{result['tokens_per_second']:.2f} total tokens/s, "
        f"{result['output_tokens_per_second']:.2f} output tokens/s\n"
        f"Total num prompt tokens:  {result['total_input_tokens']}\n"
        f"Total num output tokens:  {result['total_output_tokens']}"
    )
    save(result)
    return 0


def _latency(args: argparse.Namespace) -> int:
    batch, config = _part(options.LatencyOptions, args), configs(args, server=False)[0]
    save = _saver(args)
    logging.setup("warning")

    from jaxserve.bench.offline import measure_latency

    result = measure_latency(config, batch)
    print(f"Avg latency: {result['avg_latency']:.4f} seconds")
    for share, seconds in result["percentiles"].items():
        print(f"{share}% percentile latency: {seconds:.4f} seconds")
    save(result)
    return 0


def _startup(args: argparse.Namespace) -> int:
    starts, config = _part(options.StartupOptions, args), configs(args, server=False)[0]
    save = _saver(args)

    from jaxserve.bench.startup import measure_startup, show

    result = measure_startup(config, starts.num_warm)
    show(result)
    save({kind: [asdict(start) for start in of_kind] for kind, of_kind in result.items()})
    return 0


def _claims(args: argparse.Namespace) -> int:
    """1 if a claim does not hold."""
    asked, config = _part(options.ClaimsOptions, args), configs(args, server=False)[0]
    logging.setup("warning")

    from rich.console import Console

    from jaxserve.bench.claims import FULL, QUICK, check_claims, choose, report, show
    from jaxserve.bench.machine import write_file

    claims = choose(asked.claims)
    for name in ("json", "output"):
        if (path := getattr(asked, name)) is not None:
            _check_file(name, Path(path))
    console = Console(record=asked.output is not None)
    repeats = asked.repeats or (1 if asked.quick else 3)
    progress = Console(stderr=True)
    outcomes = check_claims(config, claims, QUICK if asked.quick else FULL, repeats, progress.print)
    show(outcomes, console)
    if asked.output is not None:
        write_file(Path(asked.output), console.export_svg(title="jaxserve bench claims"))
    if asked.json is not None:
        _save(Path(asked.json), {"quick": asked.quick, "claims": report(outcomes)})
    return 0 if all(check.holds for outcome in outcomes for check in outcome.checks) else 1


def _saver(args: argparse.Namespace) -> Callable[[dict[str, Any]], None]:
    """What is to be done with a result."""
    output: options.OutputOptions = _part(options.OutputOptions, args)
    if not (output.save_result or output.result_filename):
        return lambda result: None
    path = Path(output.result_filename or time.strftime("jaxserve-bench-%Y%m%d-%H%M%S.json"))
    _check_file("result_filename", path)
    return lambda result: _save(path, result)


def _check_file(name: str, path: Path) -> None:
    """Before anything is measured, which takes minutes."""
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"{name} must be a file in a folder that exists, got {str(path)!r}.", name)


def _save(path: Path, result: dict[str, Any]) -> None:
    from jaxserve.bench.machine import write_report

    write_report(path, result)
