#!/usr/bin/env python3
"""The least time that a step can take: bytes and operations of each kernel, against what a chip can do.

    python tools/roofline.py --model llama-3.1-8b --chip h200 --batch 1,32,128 --context 2048
    python tools/roofline.py --model smollm2-135m --chip cpu --dtype float32 --weights int4 --kv float32 --kernels
    python tools/roofline.py --model path/to/config.json --chip all --batch 64 --chunk 512 --kv int8 --json
    python tools/roofline.py --chip measure        # this machine's CPU, measured now

Two bounds are shown. The *floor* reads every weight and every cached key once and does the operations meanwhile; no
program beats it. *Kernel by kernel* adds what kernels hand to each other through memory, one after the other; a program
made of these kernels does not beat that one.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from jaxserve.models.config import ModelConfig
from jaxserve.roofline import (
    CHIPS,
    MODELS,
    Bound,
    Chip,
    Precision,
    StepShape,
    Work,
    kernels_bound,
    kv_token_bytes,
    step_bound,
    step_work,
    weight_bytes,
)

__all__ = ["main"]

_GIB = 1 << 30
_READ = 1 << 28  # floats per thread: far beyond any cache
_PRODUCT = 4096


def measure_cpu() -> Chip:
    """This machine's CPU: the best of a few reads of memory by all threads, and of a few float32 products."""
    threads = len(os.sched_getaffinity(0))
    data = np.ones((threads, _READ // threads), np.float32)
    with ThreadPoolExecutor(threads) as pool:
        bandwidth = data.nbytes / min(timed(lambda: list(pool.map(np.max, data))) for _ in range(5))
    square = np.ones((_PRODUCT, _PRODUCT), np.float32)
    speed = 2 * _PRODUCT**3 / min(timed(lambda: square @ square) for _ in range(3))
    speeds = dict.fromkeys(("float32", "bfloat16", "float16"), speed)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Chip(f"this CPU ({threads} threads, measured)", bandwidth, memory, MappingProxyType(speeds))


def timed(function: Any) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def open_config(name: str) -> ModelConfig:
    """A known model's configuration, or that of a Hugging Face folder or config.json."""
    if name in MODELS:
        return MODELS[name]
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.exists():
        raise SystemExit(f"{name} is neither a config.json nor one of {', '.join(MODELS)}")
    from jaxserve.models.hf_config import from_hf  # brings jax along, which the rest does without

    return from_hf(json.loads(path.read_text()))


def chips(names: Sequence[str]) -> Iterator[Chip]:
    for name in names:
        if name == "all":
            yield from CHIPS.values()
        else:
            yield measure_cpu() if name == "measure" else CHIPS[name]


def needed(model: ModelConfig, step: StepShape, precision: Precision) -> float:
    """Bytes of weights and of the step's caches."""
    cached = step.decodes * step.context + step.before + step.chunk
    return weight_bytes(model, precision) + cached * kv_token_bytes(model, precision)


def record(model: ModelConfig, step: StepShape, precision: Precision, chip: Chip) -> dict[str, Any]:
    """All figures of one step on one chip; times in seconds."""
    works = step_work(model, step, precision)
    dtype = precision.activations
    floor, kernels = step_bound(works, chip, dtype), kernels_bound(works, chip, dtype)
    return {
        "chip": chip.name,
        "step": {name: getattr(step, name) for name in StepShape.__slots__},
        "precision": {name: getattr(precision, name) for name in Precision.__slots__},
        "memory_bytes": needed(model, step, precision),
        "fits": needed(model, step, precision) <= chip.memory,
        "floor": bound_record(floor, step),
        "kernel_by_kernel": bound_record(kernels, step),
        "kernels": [work_record(work, chip, dtype) for work in works],
    }


def bound_record(bound: Bound, step: StepShape) -> dict[str, Any]:
    return {
        "seconds": bound.seconds,
        "memory_seconds": bound.memory_seconds,
        "compute_seconds": bound.compute_seconds,
        "generated_per_second": bound.generated_per_second(step),
        "prompt_per_second": bound.prompt_per_second(step),
    }


def work_record(work: Work, chip: Chip, dtype: str) -> dict[str, Any]:
    bound = kernels_bound([work], chip, dtype)
    return {
        "name": work.name,
        "count": work.count,
        "weight_bytes": work.weight_bytes,
        "kv_bytes": work.kv_bytes,
        "activation_bytes": work.activation_bytes,
        "operations": work.operations,
        "seconds": bound.seconds,
        "bound_by": "memory" if bound.is_memory_bound else "compute",
    }


def show(records: Sequence[dict[str, Any]], model: ModelConfig, precision: Precision) -> None:
    table = Table(
        *("chip", "decodes", "context", "chunk", "memory GiB", "floor ms", "by kernel ms", "bound by"),
        *("decoded tok/s", "prompt tok/s"),
        title=f"{weight_bytes(model, precision) / _GIB:.2f} GiB of weights, "
        f"{kv_token_bytes(model, precision) / 1024:.1f} KiB of KV per token",
    )
    for entry in records:
        step, floor, kernels = entry["step"], entry["floor"], entry["kernel_by_kernel"]
        by = "memory" if floor["memory_seconds"] >= floor["compute_seconds"] else "compute"
        table.add_row(
            entry["chip"],
            *(str(step[name]) for name in ("decodes", "context", "chunk")),
            f"{entry['memory_bytes'] / _GIB:.1f}" + ("" if entry["fits"] else " (too much)"),
            *(f"{1e3 * bound['seconds']:.3f}" for bound in (floor, kernels)),
            by,
            *(f"{floor[name]:.0f}" for name in ("generated_per_second", "prompt_per_second")),
        )
    Console(width=160).print(table)


def show_kernels(entry: dict[str, Any]) -> None:
    step = entry["step"]
    table = Table(
        *("kernel", "times", "weights MB", "KV MB", "activations MB", "Gop", "µs each", "bound by"),
        title=f"{entry['chip']}: {step['decodes']} decodes at {step['context']}, chunk {step['chunk']}",
    )
    for work in entry["kernels"]:
        sizes = [f"{work[name] / 1e6:.3f}" for name in ("weight_bytes", "kv_bytes", "activation_bytes")]
        each = 1e6 * work["seconds"] / work["count"]
        table.add_row(
            *(work["name"], str(work["count"]), *sizes, f"{work['operations'] / 1e9:.2f}"),
            *(f"{each:.1f}", work["bound_by"]),
        )
    Console(width=160).print(table)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", help=f"{', '.join(MODELS)}, or a config.json")
    parser.add_argument("--chip", action="append", choices=[*CHIPS, "all", "measure"], help="by default h200")
    parser.add_argument("--batch", type=numbers, default=[1, 32, 128], metavar="N,…", help="rows that decode")
    parser.add_argument("--context", type=numbers, default=[2048], metavar="N,…", help="cached tokens of each")
    parser.add_argument("--drafts", type=int, default=0, help="tokens that each verifies besides its own")
    parser.add_argument("--chunk", type=int, default=0, help="prompt tokens in the step")
    parser.add_argument("--before", type=int, default=0, help="cached tokens of that prompt")
    parser.add_argument("--dtype", default="bfloat16", help="of activations and products")
    parser.add_argument("--weights", help="float32, bfloat16, float16, int8 or int4; by default --dtype")
    parser.add_argument("--kv", help="also int8, float8_e4m3fn, float8_e5m2; by default --dtype")
    parser.add_argument("--kernels", action="store_true", help="show each kernel too")
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")
    args = parser.parse_args()
    model = open_config(args.model)
    try:
        precision = Precision(args.dtype, args.weights or args.dtype, args.kv or args.dtype)
        steps = [
            StepShape(batch, context, args.drafts, args.chunk, args.before)
            for batch in args.batch
            for context in args.context
        ]
        records = [record(model, step, precision, chip) for chip in chips(args.chip or ["h200"]) for step in steps]
    except ValueError as error:
        parser.error(str(error))
    if args.json:
        print(json.dumps(records, indent=1))
        return
    show(records, model, precision)
    for entry in records if args.kernels else ():
        show_kernels(entry)


if __name__ == "__main__":
    main()
