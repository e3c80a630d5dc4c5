#!/usr/bin/env python3
"""What it costs to look: ``GET /debug/live`` with nobody, one and ten who look, and snapshots of 100,000 blocks.

python tools/bench_live.py                       # both parts, in about three minutes
python tools/bench_live.py --parts map           # without a model
python tools/bench_live.py --json out.json

*map* has the real scheduler and its block pool with as many requests as it is told, and steps that compute nothing:
what a snapshot takes from the engine's thread, what drawing it takes in another one, and how long either holds the
event loop. *viewers* serves a model, keeps it busy, and lets numbers of viewers look in turns; these are a process of
their own, on the same cores.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import uvicorn

from jaxserve.bench.machine import CpuMeter, foreign_text, write_report
from jaxserve.blocks import BlockManager
from jaxserve.config import EngineConfig, SchedulerConfig, ServerConfig
from jaxserve.live import EngineShape, Recorder
from jaxserve.outputs import EngineStats
from jaxserve.plan import StepResult
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler import Scheduler
from jaxserve.server import create_app
from jaxserve.server.live_events import Painter

__all__ = ["main"]

BLOCK_SIZE = 16
INTERVAL = 0.25
STEPS_BETWEEN = 12
"""Steps between two snapshots: of 20 ms each."""


# ---------------------------------------------------------------------- the map
class Host:
    """The engine's host side alone: every step is done at once, and every token is the same."""

    def __init__(self, num_blocks: int, num_requests: int) -> None:
        blocks = BlockManager(num_blocks + 1, BLOCK_SIZE)
        prompt = int(0.8 * num_blocks / num_requests) * BLOCK_SIZE
        self.scheduler = Scheduler(
            SchedulerConfig(), blocks, max_num_batched_tokens=2 * num_blocks * BLOCK_SIZE, max_num_seqs=num_requests
        )
        for index in range(num_requests):
            ids = [(index + at) % 50_000 for at in range(prompt)]
            params = SamplingParams(max_tokens=100_000)
            self.scheduler.add(Request(str(index), ids, params, 0, frozenset(), prompt + 3000))
        self.step(None)

    def step(self, recorder: Recorder | None) -> None:
        """Plan and settle."""
        plan = self.scheduler.plan()
        tokens = tuple((7,) for _ in plan.rows)
        if recorder is not None:
            recorder.note_step(plan, plan.kind, plan.num_tokens, 0.02)
        self.scheduler.update(plan, StepResult(tokens, (None,) * len(plan.rows)))


def measure_map(num_blocks: int, num_requests: int, repeats: int) -> dict[str, float]:
    """Medians, in bytes and milliseconds: of CPU time, which is what they take where nobody else wants the core."""
    host = Host(num_blocks, num_requests)
    recorder = Recorder(host.scheduler)
    shape = EngineShape(BLOCK_SIZE, num_blocks, 1, num_requests, 2048, 1, 1, 1, 2, 1)
    painter = Painter("m", 8192, shape, began=time.monotonic(), interval=INTERVAL)
    found: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[..., Any], *given: Any) -> Any:
        began = time.thread_time()
        result = work(*given)
        found.setdefault(name, []).append(1e3 * (time.thread_time() - began))
        return result

    for _ in range(repeats):
        for _ in range(STEPS_BETWEEN):
            timed("step of the scheduler, nobody looks, ms", host.step, None)
        for _ in range(STEPS_BETWEEN):
            timed("step of the scheduler, somebody looks, ms", host.step, recorder)
        snapshot = timed("snapshot, on the engine's thread, ms", recorder.take, EngineStats())
        picture = timed("drawing it, in another thread, ms", painter.draw, snapshot, (0, ()))
        start = timed("a start, in another thread, ms", picture.start)
        found.setdefault("bytes of a state", []).append(len(picture.lines))
        found.setdefault("bytes of a start", []).append(len(start))
    medians = {name: statistics.median(values[1:]) for name, values in found.items()}
    return {**medians, "longest hold of the event loop, ms": asyncio.run(_hold(host, recorder, painter, repeats))}


async def _hold(host: Host, recorder: Recorder, painter: Painter, repeats: int) -> float:
    """How late the event loop comes to something else at worst, while states and starts are made as the server does."""
    worst, done = 0.0, False

    async def watch() -> None:
        nonlocal worst
        while not done:
            began = time.perf_counter()
            await asyncio.sleep(0.001)
            worst = max(worst, time.perf_counter() - began - 0.001)

    for _ in range(STEPS_BETWEEN):
        host.step(recorder)
    snapshot = recorder.take(EngineStats())
    sys.setswitchinterval(0.001)  # as the server does
    watching = asyncio.create_task(watch())
    for _ in range(repeats):
        picture = await asyncio.to_thread(painter.draw, snapshot, (0, ()))
        await asyncio.to_thread(picture.start)
        await asyncio.sleep(0.01)
    done = True
    await watching
    return 1e3 * worst


# ---------------------------------------------------------------------- viewers
_VIEWERS = """
import selectors, socket, sys
port, count = int(sys.argv[1]), int(sys.argv[2])
found = selectors.DefaultSelector()
for _ in range(count):
    sock = socket.create_connection(("127.0.0.1", port))
    sock.sendall(b"GET /debug/live?interval=250 HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
    found.register(sock, selectors.EVENT_READ)
total = 0
print("looking", flush=True)
while True:
    for key, _ in found.select():
        total += len(key.fileobj.recv(1 << 20))
"""
"""Reads what comes, and throws it away: a client that costs as little as it can."""


async def measure_viewers(model: str, num_requests: int, seconds: float, repeats: int) -> dict[int, list[float]]:
    """Milliseconds of a step that decodes, by number of viewers: one figure per repeat, of two turns."""
    from jaxserve.engine import AsyncLLM

    llm = AsyncLLM.from_config(EngineConfig.from_flat({"model": model, "max_model_len": 2048}))
    with socket.create_server(("127.0.0.1", 0)) as sock:
        server = uvicorn.Server(
            uvicorn.Config(create_app(llm, ServerConfig()), log_config=None, lifespan="off", ws="none")
        )
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        load = [asyncio.create_task(_generate(llm, index)) for index in range(num_requests)]
        await asyncio.sleep(5.0)
        found: dict[int, list[float]] = {0: [], 1: [], 10: []}
        for _ in range(repeats):
            turns: dict[int, list[float]] = {0: [], 1: [], 10: []}
            for count in (0, 1, 10, 10, 1, 0):  # contexts grow: what is early once is late once
                turns[count].append(await _turn(llm, sock.getsockname()[1], count, seconds))
            for count, figures in turns.items():
                found[count].append(statistics.mean(figures))
        for task in load:
            task.cancel()
        await asyncio.gather(*load, return_exceptions=True)
        server.should_exit = True
        await serving
    await llm.shutdown()
    return found


async def _generate(llm: Any, number: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=1900, ignore_eos=True)
    for turn in range(1000):
        prompt = [100 + (number * 997 + turn * 31 + at * 7) % 40_000 for at in range(64)]
        async for _ in llm.generate(prompt, params, f"load-{number}-{turn}"):
            pass


async def _turn(llm: Any, port: int, count: int, seconds: float) -> float:
    viewers = None
    if count:
        viewers = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _VIEWERS, str(port), str(count), stdout=subprocess.PIPE
        )
        assert viewers.stdout is not None
        await viewers.stdout.readline()
    await asyncio.sleep(0.5)
    before = _decoded(llm)
    await asyncio.sleep(seconds)
    after = _decoded(llm)
    if viewers is not None:
        viewers.kill()
        await viewers.wait()
    return 1e3 * (after[1] - before[1]) / (after[0] - before[0])


def _decoded(llm: Any) -> tuple[int, float]:
    """Number of steps that decoded, and seconds in them."""
    timings = llm.stats().step_seconds["decode"]
    return timings.cumulative()[-1][1], timings.total


# ---------------------------------------------------------------------- both
def _show_viewers(found: dict[int, list[float]]) -> None:
    for count, figures in found.items():
        ratios = sorted(figure / alone for figure, alone in zip(figures, found[0], strict=True))
        print(
            f"{count:3d} who look: {statistics.median(figures):8.3f} ms a step; "
            f"beside nobody, median {statistics.median(ratios):.4f} ({ratios[0]:.4f} to {ratios[-1]:.4f})"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="map,viewers", help="map, viewers or both")
    parser.add_argument("--blocks", type=int, default=100_000, help="blocks of the map")
    parser.add_argument("--requests", type=int, default=256, help="running requests of the map")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--load", type=int, default=16, help="requests that keep the model busy")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a turn")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for all figures")
    args = parser.parse_args(arguments)
    report: dict[str, Any] = {}
    with CpuMeter() as meter:
        if "map" in args.parts:
            report["map"] = measure_map(args.blocks, args.requests, 20)
            for name, value in report["map"].items():
                print(f"{name:45} {value:12.3f}")
        if "viewers" in args.parts:
            report["viewers"] = asyncio.run(measure_viewers(args.model, args.load, args.seconds, args.repeats))
            _show_viewers(report["viewers"])
    print(foreign_text(meter.foreign))
    if args.json:
        write_report(args.json, {**report, "foreign": meter.foreign})


if __name__ == "__main__":
    main()
