#!/usr/bin/env python3
"""Offline throughput and latency of jaxserve beside the plain transformers loop, in one run on one machine.

    python tools/bench_offline.py                                       # W1-W3, three repeats
    python tools/bench_offline.py --systems jaxserve,naive,static --workloads w2
    python tools/bench_offline.py --set max_num_seqs=32 --repeats 5

Systems take turns within every repeat, since machines drift. Figures are medians over repeats; each repeat has other
text and the same lengths (see ``jaxserve.bench.workloads``). Static batching is measured on w2 alone, the only mixed
batch. The table goes to standard output, everything else to a JSON file.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import yaml
from rich.console import Console
from rich.table import Table

from jaxserve.bench.machine import FOREIGN_LIMIT, CpuMeter, write_report
from jaxserve.bench.workloads import Job, SharedPrefix, Text, corpus, mixed_batch, one_stream, shared_prefix
from jaxserve.engine.tokenizers import open_tokenizer

__all__ = ["main"]

Figures = dict[str, float]


class Latency(Protocol):
    """Seconds of one request."""

    started: float
    first: float
    finished: float


class System(Protocol):
    """Something that generates: one request at a time, or many at once."""

    def one(self, job: Job) -> Latency: ...

    def many(self, jobs: Sequence[Job]) -> None: ...


class Jaxserve:
    """jaxserve's offline API."""

    def __init__(self, model: str, dtype: str, settings: dict[str, Any]) -> None:
        from jaxserve import LLM

        self.llm = LLM(**{"model": model, "dtype": dtype, "max_model_len": 2048, **settings})

    def one(self, job: Job) -> Latency:
        return self._generate([job])[0]

    def many(self, jobs: Sequence[Job]) -> None:
        self._generate(jobs)

    def _generate(self, jobs: Sequence[Job]) -> list[Latency]:
        from jaxserve import SamplingParams

        params = [SamplingParams(temperature=0.0, max_tokens=job.max_tokens, ignore_eos=True) for job in jobs]
        outputs = self.llm.generate([list(job.prompt) for job in jobs], params, use_tqdm=False)
        for job, output in zip(jobs, outputs, strict=True):
            if len(output.outputs[0].token_ids) != job.max_tokens:
                raise RuntimeError(f"{len(output.outputs[0].token_ids)} tokens came, {job.max_tokens} were asked.")
        return [_Latency(o.metrics.arrived_at, o.metrics.first_token_at, o.metrics.finished_at) for o in outputs]


class _Latency:
    def __init__(self, started: float, first: float, finished: float) -> None:
        self.started, self.first, self.finished = started, first, finished


class Naive:
    """``model.generate`` for one request after the other."""

    def __init__(self, baseline: Any) -> None:
        self._baseline = baseline

    def one(self, job: Job) -> Latency:
        latency: Latency = self._baseline.one(job)
        return latency

    def many(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self.one(job)


class Static(Naive):
    """``model.generate`` for batches of fixed size, in order of arrival."""

    def __init__(self, baseline: Any, size: int) -> None:
        super().__init__(baseline)
        self._size = size

    def many(self, jobs: Sequence[Job]) -> None:
        for start in range(0, len(jobs), self._size):
            self._baseline.batch(jobs[start : start + self._size])


def measure_w1(system: System, job: Job) -> Figures:
    latency = system.one(job)
    decode = latency.finished - latency.first
    return {
        "tok/s": job.max_tokens / (latency.finished - latency.started),
        "decode tok/s": (job.max_tokens - 1) / decode,
        "ttft ms": 1e3 * (latency.first - latency.started),
    }


def measure_w2(system: System, jobs: Sequence[Job]) -> Figures:
    seconds = timed(lambda: system.many(jobs))
    output = sum(job.max_tokens for job in jobs)
    return {
        "tok/s": output / seconds,
        "total tok/s": (output + sum(len(job.prompt) for job in jobs)) / seconds,
        "wall s": seconds,
    }


def measure_w3(system: System, work: SharedPrefix) -> Figures:
    seconds = timed(lambda: system.many(work.burst))

    def ttft(jobs: Sequence[Job]) -> float:
        latencies = [system.one(job) for job in jobs]
        return 1e3 * statistics.median(latency.first - latency.started for latency in latencies)

    return {
        "tok/s": sum(job.max_tokens for job in work.burst) / seconds,
        "burst s": seconds,
        "warm ttft ms": ttft(work.warm),
        "cold ttft ms": ttft(work.cold),
    }


def timed(action: Callable[[], None]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def workloads(names: Sequence[str], text: Text, limit: int | None) -> dict[str, Callable[[System], Figures]]:
    """Per workload a function that measures it, with its prompts already drawn."""
    made: dict[str, Callable[[System], Figures]] = {}
    if "w1" in names:
        job = one_stream(text)
        made["w1"] = lambda system: measure_w1(system, job)
    if "w2" in names:
        jobs = mixed_batch(text, limit or 64)
        made["w2"] = lambda system: measure_w2(system, jobs)
    if "w3" in names:
        work = shared_prefix(text, limit or 32)
        made["w3"] = lambda system: measure_w3(system, work)
    return made


def make_systems(args: argparse.Namespace) -> dict[str, System]:
    systems: dict[str, System] = {}
    if "jaxserve" in args.systems:
        systems["jaxserve"] = Jaxserve(args.model, args.dtype, dict(args.set))
    if {"naive", "static"} & set(args.systems):
        from transformers_baseline import Baseline

        baseline = Baseline(args.model, args.dtype)
        if "naive" in args.systems:
            systems["naive"] = Naive(baseline)
        if "static" in args.systems:
            systems["static"] = Static(baseline, args.batch)
    return systems


def run(args: argparse.Namespace, tokens: Sequence[int]) -> list[dict[str, Any]]:
    """One record per repeat, workload and system: figures, share of the machine that others used, step times."""
    systems = make_systems(args)
    warm_up = Job(Text(tokens, 0).window(32), 8)
    for system in systems.values():
        system.one(warm_up)
    records = []
    for repeat in range(args.repeats):
        measures = workloads(args.workloads, Text(tokens, args.seed + repeat), args.limit)
        for name, measure in measures.items():
            for label, system in systems.items():
                if label == "static" and name != "w2":
                    continue
                if isinstance(system, Jaxserve):
                    system.llm.reset_step_stats()
                with CpuMeter() as meter:
                    figures = measure(system)
                record = {"repeat": repeat, "workload": name, "system": label, "figures": figures}
                record["foreign_cpu"] = meter.foreign
                if isinstance(system, Jaxserve):
                    record["steps"] = system.llm.step_stats()
                records.append(record)
                shown = "  ".join(f"{key} {value:.1f}" for key, value in figures.items())
                print(f"repeat {repeat + 1}  {name}  {label:9} {shown}", flush=True)
    for system in systems.values():
        if isinstance(system, Jaxserve):
            system.llm.shutdown()
    return records


def summarise(records: Sequence[dict[str, Any]]) -> dict[str, dict[str, Figures]]:
    """Workload -> system -> medians over repeats."""
    grouped: dict[str, dict[str, list[Figures]]] = {}
    for record in records:
        grouped.setdefault(record["workload"], {}).setdefault(record["system"], []).append(record["figures"])
    return {
        workload: {
            system: {key: statistics.median(figures[key] for figures in repeats) for key in repeats[0]}
            for system, repeats in by_system.items()
        }
        for workload, by_system in grouped.items()
    }


def step_times(records: Sequence[dict[str, Any]]) -> dict[str, Figures]:
    """Workload -> where jaxserve's steps spend their time, over all repeats."""
    shown: dict[str, Figures] = {}
    for workload in dict.fromkeys(record["workload"] for record in records):
        stats = [record["steps"] for record in records if record["workload"] == workload and "steps" in record]
        total = {key: sum(one[key] for one in stats) for key in stats[0]} if stats else {}
        if total.get("steps"):
            shown[workload] = {
                "steps": total["steps"],
                "host ms/step": 1e3 * total["host_seconds"] / total["steps"],
                "device wait ms/step": 1e3 * total["device_wait_seconds"] / total["steps"],
                "tokens/step": total["tokens"] / total["steps"],
                "padding %": 100 * (1 - total["tokens"] / total["padded_tokens"]),
            }
    return shown


def show(title: str, rows: dict[str, Figures], versus: str | None = None) -> None:
    """Print figures as a table, with the ratio of tokens per second to that of row ``versus``."""
    columns = list(next(iter(rows.values())))
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for column in columns + ([f"x {versus}"] if versus in rows else []):
        table.add_column(column, justify="right")
    for name, figures in rows.items():
        ratio = [f"{figures['tok/s'] / rows[versus]['tok/s']:.2f}"] if versus in rows else []
        table.add_row(name, *(f"{figures[column]:.1f}" for column in columns), *ratio)
    Console().print(table)


def setting(text: str) -> tuple[str, Any]:
    """A ``name=value`` of the command line, the value as in YAML."""
    name, found, value = text.partition("=")
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form name=value")
    return name, yaml.safe_load(value)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def names(*known: str) -> Callable[[str], list[str]]:
        def parse(text: str) -> list[str]:
            if unknown := set(text.split(",")) - set(known):
                raise argparse.ArgumentTypeError(f"{sorted(unknown)[0]!r} is none of {', '.join(known)}")
            return text.split(",")

        return parse

    parser.add_argument("--model", default="smollm2-135m", help="alias, GGUF file, folder or hub id")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="on all systems")
    parser.add_argument("--systems", type=names("jaxserve", "naive", "static"), default=["jaxserve", "naive"])
    parser.add_argument("--workloads", type=names("w1", "w2", "w3"), default=["w1", "w2", "w3"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1, help="picks the text")
    parser.add_argument("--batch", type=int, default=8, help="size of static batches")
    parser.add_argument("--limit", type=int, help="first so many requests of w2 and w3 only: a trial, not a figure")
    parser.add_argument("--set", action="append", type=setting, default=[], help="a setting of jaxserve, name=value")
    parser.add_argument("--out", type=Path, default=Path("build/bench_offline.json"))
    return parser.parse_args()


def main() -> None:
    args = arguments()
    tokenizer = open_tokenizer(args.model)
    records = run(args, corpus(lambda text: tokenizer.encode(text, add_special_tokens=False)))
    summary, steps = summarise(records), step_times(records)
    for workload, rows in summary.items():
        show(f"{workload}: medians of {args.repeats}", rows, versus="naive" if len(rows) > 1 else None)
    if steps:
        show("jaxserve: where a step's time goes", steps)
    for record in records:
        if (record["foreign_cpu"] or 0.0) > FOREIGN_LIMIT:
            where = f"repeat {record['repeat'] + 1} of {record['workload']}, {record['system']}"
            print(f"warning: others used {100 * record['foreign_cpu']:.0f} % of the machine in {where}")
    options = {key: value for key, value in vars(args).items() if key != "out"}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_report(args.out, {"options": options, "summary": summary, "steps": steps, "records": records})


if __name__ == "__main__":
    main()
