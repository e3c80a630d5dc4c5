"""The claims of adapters: many fine-tunes for little more than the base model, and at no cost to whoever uses none.

Adapters are random ones of the largest rank that is configured, for all projections unless it is said otherwise: what
they do to a text is no matter here. What differs by a few percent is measured in turns.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from jaxserve.bench.claims.claim import (
    Check,
    Claim,
    Figure,
    Figures,
    InTurns,
    Measure,
    OneByOne,
    Sizes,
    decoding,
    exactly,
    open_engine,
    open_streams,
)
from jaxserve.bench.records import percentile
from jaxserve.bench.workloads import Text
from jaxserve.config import EngineConfig, LoRAConfig
from jaxserve.engine import LLM, AsyncLLM, LoRARequest
from jaxserve.engine.random_adapters import write_random_adapter

__all__ = ["LORA"]

_MIXED = 8
"""Rows of a batch, which have an adapter each, or one together."""

_SLOTS = 4
"""Where fewer would do."""

_HELD = 30
_LOADED = 10
_PAUSE = 0.1  # seconds between two loads

_OFF = {"enable_lora": False, "lora_modules": (), "lora_dir": None, "lora_target_modules": ()}


def _on(count: int) -> dict[str, Any]:
    slots = max(_SLOTS, count)
    return {"enable_lora": True, "max_loras": slots, "max_cpu_loras": None, "lora_modules": (), "lora_dir": None}


def _with(config: EngineConfig, **settings: Any) -> EngineConfig:
    return EngineConfig.from_flat({**config.flat(), **settings})


@contextmanager
def _made(llm: LLM | AsyncLLM, lora: LoRAConfig, count: int) -> Iterator[list[tuple[str, str]]]:
    """Names and paths of adapters for an engine, which are not loaded yet."""
    narrow = {"targets": tuple(name.removesuffix("_proj") for name in lora.lora_target_modules)}
    more = narrow if lora.lora_target_modules else {}
    with TemporaryDirectory() as folder:
        yield [
            (name, write_random_adapter(Path(folder) / name, llm.model_config, lora.max_lora_rank, number, **more))
            for number, name in enumerate(f"bench-{number}" for number in range(count))
        ]


@contextmanager
def _opened(config: EngineConfig, count: int) -> Iterator[tuple[LLM, Sequence[int], list[LoRARequest]]]:
    """An engine with so many adapters, all of which are in a slot; and the text."""
    config = _with(config, **_on(count))
    with open_engine(config) as (llm, tokens), _made(llm, config.lora, count) as made:
        adapters = [LoRARequest(name, number, path) for number, (name, path) in enumerate(made, start=1)]
        llm.generate([tokens[:8]] * count, exactly(2), lora_request=adapters, use_tqdm=False)
        yield llm, tokens, adapters


def _batch(llm: LLM, sizes: Sizes, text: Text, adapters: Sequence[LoRARequest | None]) -> tuple[int, float]:
    """Tokens and seconds of decoding, with a row for each of ``adapters``."""
    prompts = [text.window(sizes.stream[0]) for _ in adapters]
    return decoding(llm.generate(prompts, exactly(sizes.copied[1]), lora_request=adapters, use_tqdm=False))


def _rate(llm: LLM, sizes: Sizes, text: Text, adapters: Sequence[LoRARequest | None]) -> Figures:
    num_tokens, seconds = _batch(llm, sizes, text, adapters)
    return {"tokens/s": num_tokens / seconds}


# ---------------------------------------------------------------------- one engine per fine-tune
@contextmanager
def _servers(config: EngineConfig, sizes: Sizes) -> Iterator[tuple[Measure, Measure]]:
    """An engine for each fine-tune, which all serve at once; one engine that has them as adapters."""
    rows = max(1, sizes.streams // 2)
    with ExitStack() as stack:
        one, tokens, adapters = stack.enter_context(_opened(config, sizes.tunes))
        many = [stack.enter_context(open_engine(_with(config, **_OFF)))[0] for _ in range(sizes.tunes)]
        threads = stack.enter_context(ThreadPoolExecutor(sizes.tunes))

        def apart(seed: int) -> Figures:
            texts = [Text(tokens, 1000 * seed + number) for number in range(sizes.tunes)]
            work = lambda llm, text: _batch(llm, sizes, text, [None] * rows)  # noqa: E731
            began = time.perf_counter()
            counts = [count for count, _ in threads.map(work, many, texts)]
            seconds = time.perf_counter() - began
            return {"weights and adapters": _mib(*many), "tokens/s": sum(counts) / seconds}

        def together(seed: int) -> Figures:
            began = time.perf_counter()
            count, _ = _batch(one, sizes, Text(tokens, 1000 * seed), adapters * rows)
            seconds = time.perf_counter() - began
            return {"weights and adapters": _mib(one), "tokens/s": count / seconds}

        yield apart, together


def _mib(*llms: LLM) -> float:
    """Weights, slots of adapters and those in host memory, in MiB."""
    held = sum(llm.engine.runner.weight_bytes + llm.adapters.num_bytes for llm in llms)
    return (held + sum(info.num_bytes for llm in llms for info in llm.adapters.infos() if info.in_host)) / 2**20


def _check_servers(off: Figures, on: Figures) -> list[Check]:
    key = "weights and adapters"
    return [
        Check(f"less memory (MiB): {on[key]:.0f} < {off[key]:.0f}", on[key] < off[key]),
        Check(
            f"more tokens per second: {on['tokens/s']:.1f} > {off['tokens/s']:.1f}", on["tokens/s"] > off["tokens/s"]
        ),
    ]


# ---------------------------------------------------------------------- what they cost
@contextmanager
def _unused(config: EngineConfig, sizes: Sizes) -> Iterator[tuple[Measure, Measure]]:
    """Requests of the base model to an engine without adapters; to one that has some."""
    with open_engine(_with(config, **_OFF)) as (plain, tokens), _opened(config, _MIXED) as (ready, _, _):
        yield (
            lambda seed: _rate(plain, sizes, Text(tokens, seed), [None] * _MIXED),
            lambda seed: _rate(ready, sizes, Text(tokens, seed), [None] * _MIXED),
        )


@contextmanager
def _mixed(config: EngineConfig, sizes: Sizes) -> Iterator[tuple[Measure, Measure]]:
    """A batch whose rows all have one adapter; one whose rows have one each."""
    with _opened(config, _MIXED) as (llm, tokens, adapters):
        yield (
            lambda seed: _rate(llm, sizes, Text(tokens, seed), adapters[:1] * _MIXED),
            lambda seed: _rate(llm, sizes, Text(tokens, seed), adapters),
        )


def _least(share: float, what: str) -> Callable[[Figures, Figures], list[Check]]:
    def checks(off: Figures, on: Figures) -> list[Check]:
        ratio = on["tokens/s"] / off["tokens/s"]
        return [Check(f"{what}: {ratio:.3f} ≥ {share}", ratio >= share)]

    return checks


# ---------------------------------------------------------------------- how much memory they take
@contextmanager
def _memory(config: EngineConfig, sizes: Sizes) -> Iterator[Measure]:
    """All adapters in host memory, and slots for all of them, if there are any."""
    count = _HELD if config.lora.enable_lora else 0
    with LLM(**config.flat()) as llm, _made(llm, config.lora, count) as made:
        for name, path in made:
            llm.adapters.load(name, path)
        weights = llm.engine.runner.weight_bytes / 2**20
        yield lambda seed: {"all": _mib(llm), "weights": weights, "slots": llm.adapters.num_bytes / 2**20}


def _check_memory(off: Figures, on: Figures) -> list[Check]:
    ratio = on["all"] / off["all"]
    return [Check(f"{_HELD} adapters take less than 0.3 of the base model: {ratio:.2f} < 1.3", ratio < 1.3)]


# ---------------------------------------------------------------------- loading
Prepare = Callable[[int], Coroutine[Any, Any, str]]
"""Makes an adapter ready, and says its name."""


@contextmanager
def _loading(config: EngineConfig, sizes: Sizes) -> Iterator[tuple[Measure, Measure]]:
    """Streams with an adapter beside short requests of another one; the same, but each has one that is loaded."""
    config = _with(config, **_on(_SLOTS))
    with open_streams(config) as (llm, tokens, runner), _made(llm, config.lora, 2 + _LOADED) as made:
        for name, path in made[:2]:
            llm.adapters.load(name, path)
        new = dict(made[2:])

        async def known(number: int) -> str:
            return made[1][0]

        async def loaded(number: int) -> str:
            name = list(new)[number]
            await asyncio.to_thread(llm.adapters.load, name, new[name])
            return name

        def quiet(seed: int) -> Figures:
            return runner.run(_gaps(llm, sizes, Text(tokens, seed), known, made[0][0]))

        def busy(seed: int) -> Figures:
            figures = runner.run(_gaps(llm, sizes, Text(tokens, seed), loaded, made[0][0]))
            for name in new:
                llm.adapters.unload(name)
            return figures

        yield quiet, busy


async def _gaps(llm: AsyncLLM, sizes: Sizes, text: Text, prepare: Prepare, adapter: str) -> Figures:
    """Times between tokens of streams with ``adapter``, while others come for those that are prepared."""
    gaps: list[float] = []
    waits: list[float] = []

    async def stream(number: int) -> None:
        newest = None
        prompt = text.window(sizes.stream[0])
        async for _ in llm.generate(prompt, exactly(sizes.stream[1]), f"stream-{number}", adapter=adapter):
            now = time.perf_counter()
            if newest is not None:
                gaps.append(1e3 * (now - newest))
            newest = now

    async def others() -> None:
        for number in range(_LOADED):
            await asyncio.sleep(_PAUSE)
            began = time.perf_counter()
            name = await prepare(number)
            async for _ in llm.generate(text.window(8), exactly(2), f"other-{number}", adapter=name):
                pass
            waits.append(1e3 * (time.perf_counter() - began))

    async with asyncio.TaskGroup() as group:
        for number in range(sizes.streams):
            group.create_task(stream(number))
        group.create_task(others())
    return {
        "p99 gap": percentile(gaps, 99),
        "median gap": percentile(gaps, 50),
        "longest gap": max(gaps),
        "until an answer": percentile(waits, 50),
    }


def _check_loading(off: Figures, on: Figures) -> list[Check]:
    ratio = on["p99 gap"] / off["p99 gap"]
    return [Check(f"loading lengthens no more than 10 % of the 99th percentile: {ratio:.2f} ≤ 1.10", ratio <= 1.1)]


_RATE = (Figure("tokens/s", "", True),)

LORA = (
    Claim(
        "lora-servers",
        "several fine-tunes: an engine each, or adapters of one",
        "engines",
        "adapters",
        InTurns(_servers),
        (Figure("weights and adapters", "MiB", False, 0), Figure("tokens/s", "", True)),
        _check_servers,
    ),
    Claim(
        "lora-unused",
        "requests without an adapter: where there are none, and where others could have one",
        "no adapters",
        "unused",
        InTurns(_unused),
        _RATE,
        _least(0.99, "adapters cost nothing where none is used"),
    ),
    Claim(
        "lora-mixed",
        f"{_MIXED} requests in a batch: one adapter for all, or {_MIXED}",
        "one adapter",
        f"{_MIXED} adapters",
        InTurns(_mixed),
        _RATE,
        _least(0.9, "a mixed batch is as fast, but for 10 %"),
    ),
    Claim(
        "lora-memory",
        f"memory of the base model, and of {_HELD} adapters for q and v beside it",
        "base model",
        f"{_HELD} adapters",
        OneByOne(
            lambda sizes, config: (
                {**_OFF, "warmup": False},
                {**_on(_HELD), "warmup": False, "lora_target_modules": ("q_proj", "v_proj")},
            ),
            _memory,
        ),
        (Figure("all", "MiB", False, 0), Figure("weights", "MiB", False, 0), Figure("slots", "MiB", False, 0)),
        _check_memory,
    ),
    Claim(
        "lora-loading",
        f"gaps between tokens of streams while {_LOADED} adapters are loaded",
        "quiet",
        "loading",
        InTurns(_loading),
        (
            Figure("p99 gap", "ms", False),
            Figure("median gap", "ms", False),
            Figure("longest gap", "ms", False),
            Figure("until an answer", "ms", False),
        ),
        _check_loading,
    ),
)
