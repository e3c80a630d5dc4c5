#!/usr/bin/env python3
"""Seconds that ``LLM(...)`` takes to start, by phase, and its peak memory: with empty caches, and with filled ones.

    python tools/bench_startup.py
    python tools/bench_startup.py --warm 5 --set max_num_seqs=16

Every start is a process of its own. The cold one finds empty folders for converted weights and compiled programs; the
warm ones find what it left there. The operating system may hold the model's file in memory all along.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import FOREIGN_LIMIT, CpuMeter, circumstances, setting, write_report
from rich.console import Console
from rich.table import Table

__all__ = ["main"]

Record = dict[str, float]


def start_here(settings: dict[str, Any]) -> Record:
    """Start an engine in this process, and generate one token."""
    began = time.perf_counter()
    from jaxserve import LLM, SamplingParams

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


def start_elsewhere(settings: dict[str, Any]) -> Record:
    """Do so in a new process; ``total`` is from its creation to its end."""
    with CpuMeter() as meter:
        began = time.perf_counter()
        command = [sys.executable, __file__, "--child", json.dumps(settings)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        total = time.perf_counter() - began
    record: Record = json.loads(done.stdout.splitlines()[-1])
    return {**record, "total": total, "foreign_cpu": meter.foreign}


def show(starts: dict[str, list[Record]]) -> dict[str, Record]:
    """Print a table of medians, and return them."""
    medians = {
        kind: {key: statistics.median(record[key] for record in records) for key in records[0]}
        for kind, records in starts.items()
    }
    table = Table(title="start-up, seconds", title_justify="left")
    table.add_column("")
    for kind, records in starts.items():
        table.add_column(f"{kind} (of {len(records)})", justify="right")
    for key in dict.fromkeys(key for record in medians.values() for key in record if key != "foreign_cpu"):
        table.add_row(key, *(f"{record[key]:.2f}" if key in record else "" for record in medians.values()))
    Console().print(table)
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="alias, GGUF file, folder or hub id")
    parser.add_argument("--warm", type=int, default=3, help="number of warm starts")
    parser.add_argument("--set", action="append", type=setting, default=[], help="a setting of jaxserve, name=value")
    parser.add_argument("--out", type=Path, default=Path("build/bench_startup.json"))
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        print(json.dumps(start_here(args.child)))
        return
    with tempfile.TemporaryDirectory() as caches:
        settings = {
            "model": args.model,
            "weight_cache_dir": f"{caches}/weights",
            "compilation_cache_dir": f"{caches}/programs",
            **dict(args.set),
        }
        starts = {
            "cold": [start_elsewhere(settings)],
            "warm": [start_elsewhere(settings) for _ in range(args.warm)],
        }
    medians = show(starts)
    for kind, records in starts.items():
        for number, record in enumerate(records, start=1):
            if record["foreign_cpu"] > FOREIGN_LIMIT:
                print(
                    f"warning: others used {100 * record['foreign_cpu']:.0f} % of the machine in {kind} start {number}"
                )
    write_report(args.out, {**circumstances(), "settings": dict(args.set), "medians": medians, "starts": starts})


if __name__ == "__main__":
    main()
