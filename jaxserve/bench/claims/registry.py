"""The claims. A new one is a function that measures it, and an entry in ``CLAIMS``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from jaxserve.bench.claims.claim import (
    Check,
    Claim,
    Figure,
    Figures,
    Sizes,
    Ways,
    exactly,
    offline,
    online,
)
from jaxserve.bench.claims.lora import LORA
from jaxserve.bench.claims.speculation import SPECULATION
from jaxserve.bench.records import percentile
from jaxserve.bench.workloads import Text, mixed_lengths
from jaxserve.config import EngineConfig
from jaxserve.engine import LLM, AsyncLLM
from jaxserve.outputs import RequestOutput

__all__ = ["CLAIMS", "FULL", "QUICK"]

FULL = Sizes(
    context=2048,
    regions=8,
    mixed=tuple(islice(mixed_lengths(), 64)),
    seats=16,
    prefix=1024,
    own=32,
    later=8,
    streams=8,
    stream=(64, 192),
    long=(2000, 16),
    num_long=4,
    chunk=512,
    copied=(256, 96),
    batches=(1, 8, 32),
    tunes=3,
)
QUICK = replace(
    FULL,
    regions=4,
    mixed=FULL.mixed[:16],
    seats=4,
    later=3,
    streams=4,
    stream=(32, 64),
    long=(2000, 4),
    num_long=1,
    batches=(1, 8),
)


def _generate(llm: LLM, sizes: Sizes, text: Text) -> tuple[list[RequestOutput], float, dict[str, float]]:
    """The mixed batch: outputs, seconds, and the clock of its steps."""
    prompts = [text.window(prompt) for prompt, _ in sizes.mixed]
    llm.reset_step_stats()
    began = time.perf_counter()
    outputs = llm.generate(prompts, [exactly(output) for _, output in sizes.mixed], use_tqdm=False)
    return outputs, time.perf_counter() - began, llm.step_stats()


def _rate(outputs: Sequence[RequestOutput], seconds: float) -> float:
    return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds


def _paged_kv(llm: LLM, sizes: Sizes, text: Text) -> Figures:
    outputs, seconds, steps = _generate(llm, sizes, text)
    unused = (steps["kv_slots"] - steps["kv_tokens"]) / steps["rows"]
    return {
        "sequences at once": steps["most_rows"],
        "tokens/s": _rate(outputs, seconds),
        "unused places per sequence": unused,
        "of them in blocks": unused / llm.engine.scheduler.blocks.block_size,
    }


def _check_paged_kv(off: Figures, on: Figures) -> list[Check]:
    unused = on["of them in blocks"]
    return [
        *_more("sequences at once", "more sequences in the same memory")(off, on),
        Check(f"at most half a block per sequence is unused: {unused:.2f} ≤ 0.50", unused <= 0.5),
    ]


def _continuous_batching(llm: LLM, sizes: Sizes, text: Text) -> Figures:
    outputs, seconds, _ = _generate(llm, sizes, text)
    latencies = [output.metrics.finished_at - output.metrics.arrived_at for output in outputs]
    return {"tokens/s": _rate(outputs, seconds), "mean latency": sum(latencies) / len(latencies)}


def _prefix_caching(llm: LLM, sizes: Sizes, text: Text) -> Figures:
    prefix = text.window(sizes.prefix)

    def ttft() -> float:
        [output] = llm.generate([prefix + text.window(sizes.own)], exactly(2), use_tqdm=False)
        return 1e3 * (output.metrics.first_token_at - output.metrics.arrived_at)

    return {"first request": ttft(), "later requests": percentile([ttft() for _ in range(sizes.later)], 50)}


async def _chunked_prefill(llm: AsyncLLM, sizes: Sizes, text: Text) -> Figures:
    """Streams run; when each has begun, long prompts come, one after the other."""
    running = [asyncio.Event() for _ in range(sizes.streams)]
    gaps: list[float] = []

    async def stream(number: int) -> None:
        newest = None
        async for _ in llm.generate(text.window(sizes.stream[0]), exactly(sizes.stream[1]), f"stream-{number}"):
            now = time.perf_counter()
            if newest is not None:
                gaps.append(1e3 * (now - newest))
            newest = now
            running[number].set()

    async def long_prompts() -> None:
        for started in running:
            await started.wait()
        for number in range(sizes.num_long):
            async for _ in llm.generate(text.window(sizes.long[0]), exactly(sizes.long[1]), f"long-{number}"):
                pass

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number in range(sizes.streams):
            group.create_task(stream(number))
        group.create_task(long_prompts())
    seconds = time.perf_counter() - began
    num_tokens = sizes.streams * sum(sizes.stream) + sizes.num_long * sum(sizes.long)
    return {
        "p99 gap": percentile(gaps, 99),
        "longest gap": max(gaps),
        "median gap": percentile(gaps, 50),
        "total tokens/s": num_tokens / seconds,
    }


def _less(key: str, what: str) -> Callable[[Figures, Figures], list[Check]]:
    return lambda off, on: [Check(f"{what}: {on[key]:.1f} < {off[key]:.1f}", on[key] < off[key])]


def _more(key: str, what: str) -> Callable[[Figures, Figures], list[Check]]:
    return lambda off, on: [Check(f"{what}: {on[key]:.1f} > {off[key]:.1f}", on[key] > off[key])]


def _same_anywhere(**settings: tuple[Any, Any]) -> Callable[[Sizes, EngineConfig], Ways]:
    """Settings (off, on) that depend on neither sizes nor configuration."""
    ways = {name: off for name, (off, _) in settings.items()}, {name: on for name, (_, on) in settings.items()}
    return lambda sizes, config: ways


def _batching(sizes: Sizes, config: EngineConfig) -> Ways:
    seats = min(sizes.seats, config.scheduler.max_num_seqs or sizes.seats)
    return {"batching": "static", "max_num_seqs": seats}, {"batching": "continuous", "max_num_seqs": seats}


def _prefill(sizes: Sizes, config: EngineConfig) -> Ways:
    whole = config.model.max_model_len
    chunk = config.scheduler.max_num_batched_tokens or sizes.chunk
    # A long prompt must find a seat beside all streams, or it waits for their end and disturbs nobody.
    seats = {"max_num_seqs": max(sizes.streams + 1, min(chunk, config.scheduler.max_num_seqs or 2 * sizes.streams))}
    return (
        {"enable_chunked_prefill": False, "max_num_batched_tokens": whole, **seats},
        {"enable_chunked_prefill": True, "max_num_batched_tokens": chunk, **seats},
    )


CLAIMS: Mapping[str, Claim] = {
    claim.name: claim
    for claim in (
        Claim(
            "paged-kv",
            "KV memory of one size: contiguous regions, or blocks",
            "contiguous",
            "paged",
            _same_anywhere(kv_reservation=("contiguous", "paged")),
            offline(_paged_kv),
            (
                Figure("sequences at once", "", True, 0),
                Figure("tokens/s", "", True),
                Figure("unused places per sequence", "tokens", False),
                Figure("of them in blocks", "blocks", False, 2),
            ),
            _check_paged_kv,
        ),
        Claim(
            "continuous-batching",
            "unequal requests: static batches, or a batch that is formed anew at every step",
            "static",
            "continuous",
            _batching,
            offline(_continuous_batching),
            (Figure("tokens/s", "", True), Figure("mean latency", "s", False, 2)),
            _more("tokens/s", "more tokens per second"),
        ),
        Claim(
            "prefix-caching",
            "time to the first token of requests that share a long prefix",
            "cache off",
            "cache on",
            _same_anywhere(enable_prefix_caching=(False, True)),
            offline(_prefix_caching),
            (Figure("later requests", "ms", False), Figure("first request", "ms", False)),
            _less("later requests", "later requests start sooner (ms)"),
        ),
        Claim(
            "chunked-prefill",
            "gaps between tokens of running streams while long prompts arrive",
            "whole",
            "chunked",
            _prefill,
            online(_chunked_prefill),
            (
                Figure("p99 gap", "ms", False),
                Figure("longest gap", "ms", False),
                Figure("median gap", "ms", False),
                Figure("total tokens/s", "", True),
            ),
            _less("p99 gap", "the worst gaps are shorter (ms)"),
        ),
        SPECULATION,
        *LORA,
    )
}
