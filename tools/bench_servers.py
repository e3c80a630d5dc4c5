#!/usr/bin/env python3
"""Servers with OpenAI's API side by side: the same requests, in turn, in one run on one machine.

    python tools/bench_servers.py --server jaxserve=http://127.0.0.1:8000 --server other=http://127.0.0.1:8201
    python tools/bench_servers.py --server … --workloads w1,w2 --repeats 3 --tokenizer smollm2-135m

The servers are already running, and idle ones must not compute. W1 to W4 are those of ``jaxserve.bench.workloads``;
prompts are sent as token ids, answers are streamed, greedy, and as long as planned. The first server is the one that
others are compared with: a ratio is taken within each repeat, and the median of the ratios is shown.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxserve.bench.client import Client
from jaxserve.bench.datasets import Sample
from jaxserve.bench.machine import circumstances, write_report
from jaxserve.bench.options import ServeOptions
from jaxserve.bench.records import Record, percentile
from jaxserve.bench.workloads import Arrival, Job, Text, corpus, mixed_batch, one_stream, shared_prefix, stream_of_chats
from jaxserve.engine.tokenizers import open_tokenizer

__all__ = ["main"]

Figures = dict[str, float]


async def ask(client: Client, job: Job) -> Record:
    record = await client.ask(Sample(job.prompt, "", len(job.prompt), job.max_tokens))
    if record.error is not None:
        raise RuntimeError(record.error)
    return record


async def together(client: Client, jobs: Sequence[Job]) -> list[Record]:
    return list(await asyncio.gather(*(ask(client, job) for job in jobs)))


async def w1(client: Client, text: Text) -> Figures:
    await ask(client, one_stream(text))
    records = [await ask(client, one_stream(text)) for _ in range(3)]
    return {
        "decode tok/s": statistics.median(1 / record.tpot for record in records if record.tpot),
        "ttft ms": 1e3 * statistics.median(record.ttft for record in records),
    }


async def w2(client: Client, text: Text) -> Figures:
    start = time.perf_counter()
    records = await together(client, mixed_batch(text))
    return {"tok/s": sum(record.num_output for record in records) / (time.perf_counter() - start)}


async def w3(client: Client, text: Text) -> Figures:
    work = shared_prefix(text)
    await ask(client, work.burst[0])
    warm = [await ask(client, job) for job in work.warm]
    cold = [await ask(client, job) for job in work.cold]
    warm_ms, cold_ms = (1e3 * statistics.median(record.ttft for record in records) for records in (warm, cold))
    return {"warm ttft ms": warm_ms, "cold ttft ms": cold_ms, "warm / cold": warm_ms / cold_ms}


async def w4(client: Client, text: Text) -> Figures:
    start = time.perf_counter()

    async def arrive(arrival: Arrival) -> Record:
        await asyncio.sleep(arrival.at)
        return await ask(client, arrival.job)

    arrivals = stream_of_chats(text, seconds=60)
    records = await asyncio.gather(*map(arrive, arrivals))
    seconds = time.perf_counter() - start
    chats = [record for record, arrival in zip(records, arrivals, strict=True) if not arrival.is_long]
    gaps = [gap for record in chats for gap in record.itl]
    return {
        "itl p50 ms": 1e3 * percentile(gaps, 50),
        "itl p99 ms": 1e3 * percentile(gaps, 99),
        "chat ttft p50 ms": 1e3 * percentile([record.ttft for record in chats], 50),
        "tok/s": sum(record.num_output for record in records) / seconds,
    }


WORKLOADS: dict[str, Callable[[Client, Text], Coroutine[Any, Any, Figures]]] = {"w1": w1, "w2": w2, "w3": w3, "w4": w4}


async def measure(name: str, url: str, text: Text) -> Figures:
    async with Client(ServeOptions(base_url=url, ignore_eos=True)) as client:
        await client.find_model()
        return await WORKLOADS[name](client, text)


def run(args: argparse.Namespace, tokens: Sequence[int]) -> list[dict[str, Any]]:
    records = []
    for repeat in range(args.repeats):
        for workload in args.workloads:
            for server, url in args.server:
                # Another text for every repeat, or a prefix cache answers it; the same for every server.
                figures = asyncio.run(measure(workload, url, Text(tokens, args.seed + repeat)))
                records.append({"repeat": repeat, "workload": workload, "server": server, "figures": figures})
                shown = "  ".join(f"{key} {value:.2f}" for key, value in figures.items())
                print(f"repeat {repeat + 1}  {workload}  {server:12} {shown}", flush=True)
    return records


def show(workload: str, servers: Sequence[str], records: Sequence[dict[str, Any]]) -> None:
    table = Table(title=f"{workload}: medians, and the median of the first server's ratio to each")
    runs = {
        server: [r["figures"] for r in records if (r["workload"], r["server"]) == (workload, server)]
        for server in servers
    }
    keys = list(runs[servers[0]][0])
    for column in ("", *keys, *(f"ratio: {key}" for key in keys)):
        table.add_column(column, justify="right")
    for server in servers:
        pairs = list(zip(runs[servers[0]], runs[server], strict=True))
        medians = [statistics.median(figures[key] for figures in runs[server]) for key in keys]
        ratios = [statistics.median(ours[key] / theirs[key] for ours, theirs in pairs) for key in keys]
        table.add_row(server, *(f"{value:.3g}" for value in (*medians, *ratios)))
    Console(width=150).print(table)


def named_url(text: str) -> tuple[str, str]:
    name, separator, url = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=URL")
    return name, url


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", type=named_url, action="append", required=True, metavar="NAME=URL")
    parser.add_argument("--workloads", type=lambda text: text.split(","), default=["w1", "w2", "w3", "w4"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer", default="smollm2-135m", help="of the model that all servers serve")
    parser.add_argument("--out", type=Path, default=Path("bench_servers.json"))
    args = parser.parse_args()
    encode = open_tokenizer(args.tokenizer).encode
    records = run(args, corpus(lambda text: encode(text, add_special_tokens=False)))
    servers = [name for name, _ in args.server]
    for workload in args.workloads:
        show(workload, servers, records)
    write_report(args.out, {"circumstances": circumstances(), "records": records})


if __name__ == "__main__":
    main()
