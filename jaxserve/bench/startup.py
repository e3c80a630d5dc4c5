"""Seconds that an engine takes to start, by phase, and its peak memory: with empty caches, and with filled ones.

Every start is a process of its own. The cold one finds empty folders for converted weights and compiled programs; the
warm ones find what it left there. The operating system may hold the model's file in memory all along.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

from jaxserve.bench.machine import CpuMeter, foreign_text
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError, JaxserveError

__all__ = ["Start", "measure_startup", "show"]

_CACHES = ("weight_cache_dir", "compilation_cache_dir")


@dataclass(frozen=True)
class Start:
    """One start: seconds by phase (and ``peak MiB``), and the share of the machine that others used."""

    figures: dict[str, float]
    foreign: float | None


def measure_startup(config: EngineConfig, num_warm: int) -> dict[str, list[Start]]:
    """One cold start and ``num_warm`` warm ones, each with a first token.

    ConfigError: the configuration names a folder for a cache. JaxserveError: a start failed, with its last words.
    """
    settings = config.flat()
    for name in _CACHES:
        if settings[name] not in (None, "off"):
            raise ConfigError(f"--{name.replace('_', '-')} must be left out: the first start needs an empty cache.")
    with tempfile.TemporaryDirectory(prefix="jaxserve-startup-") as caches:
        settings |= {name: f"{caches}/{name}" for name in _CACHES if settings[name] is None}
        return {"cold": [_start_elsewhere(settings)], "warm": [_start_elsewhere(settings) for _ in range(num_warm)]}


def show(starts: dict[str, list[Start]]) -> None:
    """Print a table of medians, and which starts others disturbed."""
    # Not above: the processes that are timed import this module.
    from rich.console import Console
    from rich.table import Table

    medians = {
        kind: {key: statistics.median(start.figures[key] for start in of_kind) for key in of_kind[0].figures}
        for kind, of_kind in starts.items()
    }
    table = Table(title="start-up, seconds", title_justify="left")
    table.add_column("")
    for kind, of_kind in starts.items():
        table.add_column(f"{kind} (of {len(of_kind)})", justify="right")
    for key in dict.fromkeys(key for figures in medians.values() for key in figures):
        table.add_row(key, *(f"{figures[key]:.2f}" if key in figures else "" for figures in medians.values()))
    Console().print(table)
    for kind, of_kind in starts.items():
        for number, start in enumerate(of_kind, start=1):
            print(f"{kind} start {number}: {foreign_text(start.foreign)}")


def _start_elsewhere(settings: dict[str, Any]) -> Start:
    """Start in a new process; ``total`` is from its creation to its end."""
    with CpuMeter() as meter:
        began = time.perf_counter()
        command = [sys.executable, "-m", __name__, json.dumps(settings)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        total = time.perf_counter() - began
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise JaxserveError(f"the engine did not start (exit code {done.returncode}): {last}")
    return Start({**json.loads(done.stdout.splitlines()[-1]), "total": total}, meter.foreign)


def _start_here(settings: dict[str, Any]) -> dict[str, float]:
    """Start an engine in this process, and generate one token."""
    began = time.perf_counter()
    from jaxserve.engine import LLM
    from jaxserve.sampling_params import SamplingParams

    llm = LLM(**settings)
    ready = time.perf_counter()
    llm.generate([[1]], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
    first_token = time.perf_counter() - ready
    phases = llm.startup_phases
    llm.shutdown()
    return {
        "imports": ready - began - sum(phases.values()),
        **phases,
        "first token": first_token,
        # Linux counts in KiB, macOS in bytes.
        "peak MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10),
    }


def _main(settings: str) -> int:
    """Start with settings in JSON, and print the figures; what was asked for in vain is told in one line."""
    try:
        print(json.dumps(_start_here(json.loads(settings))))
    except JaxserveError as error:
        message = error.as_typed() if isinstance(error, ConfigError) else str(error)
        print(" ".join(message.split()), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1]))
