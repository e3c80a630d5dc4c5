"""The claims of adapters: many fine-tunes for little more than the base model, and at no cost to whoever uses none.

Adapters are random ones of the largest rank that is configured: what they do to a text is no matter here. They change
all projections, but where slots have room for some only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from jaxserve.bench.claims.claim import (
    Check,
    Claim,
    Figure,
    Figures,
    Measure,
    Sizes,
    decoding,
    exactly,
    tokens_of,
)
from jaxserve.bench.records import percentile
from jaxserve.bench.workloads import Text
from jaxserve.config import EngineConfig, LoRAConfig
from jaxserve.engine import LLM, AsyncLLM, LoRARequest
from jaxserve.engine.random_adapters import write_random_adapter

__all__ = ["LORA"]

_ROWS = 8  # of a batch, which have an adapter each, or one together
_HELD = 30
_SLOTS = 4  # fewer than adapters that come one after the other
_LOADED = 10
_PAUSE = 0.1  # seconds between two of these

_OFF = asdict(LoRAConfig())  # where adapters are off, no flag of theirs may be set
_NONE = {"lora_modules": (), "lora_dir": None, "lora_target_modules": ()}


def _on(num_slots: int, **more: Any) -> dict[str, Any]:
    """Settings of an engine with slots and no adapters."""
    return {**_NONE, "enable_lora": True, "max_loras": num_slots, "max_cpu_loras": None, **more}


@contextmanager
def _loaded(llm: LLM | AsyncLLM, lora: LoRAConfig, count: int) -> Iterator[list[LoRARequest]]:
    """New adapters of an engine, whose files are there for as long as the context."""
    targets = {"targets": tuple(name.removesuffix("_proj") for name in lora.lora_target_modules)}
    more = targets if lora.lora_target_modules else {}
    with TemporaryDirectory() as folder:
        adapters = []
        for number in range(1, count + 1):
            name = f"bench-{number}"
            path = write_random_adapter(Path(folder) / name, llm.model_config, lora.max_lora_rank, number, **more)
            llm.adapters.load(name, path)
            adapters.append(LoRARequest(name, number))
        yield adapters


@contextmanager
def _opened(config: EngineConfig, count: int) -> Iterator[tuple[LLM, Sequence[int], list[LoRARequest]]]:
    """An engine that has run, the text, and ``count`` adapters, which are in slots."""
    with LLM(**config.flat()) as llm, _loaded(llm, config.lora, count) as adapters:
        tokens = tokens_of(llm)
        asked = adapters or None
        llm.generate([tokens[:8]] * max(1, count), exactly(2), lora_request=asked, use_tqdm=False)
        yield llm, tokens, adapters


def _slots(config: EngineConfig) -> int:
    return config.lora.max_loras if config.lora.enable_lora else 0


def _batch(llm: LLM, sizes: Sizes, text: Text, adapters: Sequence[LoRARequest | None]) -> tuple[int, float]:
    """Tokens and seconds of decoding, with a row for each of ``adapters``."""
    prompts = [text.window(sizes.stream[0]) for _ in adapters]
    return decoding(llm.generate(prompts, exactly(sizes.copied[1]), lora_request=adapters, use_tqdm=False))


# ---------------------------------------------------------------------- an engine for each fine-tune
@contextmanager
def _servers(config: EngineConfig, sizes: Sizes) -> Iterator[Measure]:
    """An engine for each fine-tune, which all serve at once; or one engine that has them as adapters."""
    num_slots, rows = _slots(config), max(1, sizes.streams // 2)
    count = 1 if num_slots else sizes.tunes
    with ExitStack() as stack:
        engines = [stack.enter_context(_opened(config, num_slots)) for _ in range(count)]
        threads = stack.enter_context(ThreadPoolExecutor(count))
        llms = [llm for llm, _, _ in engines]

        def work(number: int, seed: int) -> int:
            llm, tokens, adapters = engines[number]
            asked: list[LoRARequest | None] = [*adapters] * rows or [None] * rows
            return _batch(llm, sizes, Text(tokens, 1000 * seed + number), asked)[0]

        def measure(seed: int) -> Iterator[Figures]:
            began = time.perf_counter()
            num_tokens = sum(threads.map(work, range(count), [seed] * count))
            yield {"weights and adapters": _mib(*llms), "tokens/s": num_tokens / (time.perf_counter() - began)}

        yield measure


def _mib(*llms: LLM) -> float:
    """Weights, slots of adapters, and adapters in host memory, in MiB."""
    held = sum(llm.engine.runner.weight_bytes + llm.adapters.num_bytes for llm in llms)
    return (held + sum(info.num_bytes for llm in llms for info in llm.adapters.infos() if info.in_host)) / 2**20


def _check_servers(off: Figures, on: Figures) -> list[Check]:
    key = "weights and adapters"
    return [
        Check(f"less memory (MiB): {on[key]:.0f} < {off[key]:.0f}", on[key] < off[key]),
        Check(f"more tokens/s: {on['tokens/s']:.1f} > {off['tokens/s']:.1f}", on["tokens/s"] > off["tokens/s"]),
    ]


# ---------------------------------------------------------------------- what they cost
@contextmanager
def _unused(config: EngineConfig, sizes: Sizes) -> Iterator[Measure]:
    """A batch without adapters."""
    with _opened(config, _slots(config)) as (llm, tokens, _):
        yield lambda seed: _rates(llm, sizes, Text(tokens, seed), [None])


@contextmanager
def _mixed(config: EngineConfig, sizes: Sizes) -> Iterator[Measure]:
    """A batch whose rows have as many adapters as there are slots."""
    with _opened(config, _slots(config)) as (llm, tokens, adapters):
        yield lambda seed: _rates(llm, sizes, Text(tokens, seed), adapters)


def _rates(llm: LLM, sizes: Sizes, text: Text, adapters: Sequence[LoRARequest | None]) -> Iterator[Figures]:
    num_tokens, seconds = _batch(llm, sizes, text, [adapters[row % len(adapters)] for row in range(_ROWS)])
    yield {"tokens/s": num_tokens / seconds}


def _least(share: float, what: str) -> Callable[[Figures, Figures], list[Check]]:
    def checks(off: Figures, on: Figures) -> list[Check]:
        ratio = on["tokens/s"] / off["tokens/s"]
        return [Check(f"{what}: {ratio:.3f} ≥ {share}", ratio >= share)]

    return checks


# ---------------------------------------------------------------------- how much memory they take
@contextmanager
def _memory(config: EngineConfig, sizes: Sizes) -> Iterator[Measure]:
    """An adapter for every slot, in host memory too."""
    with LLM(**config.flat()) as llm, _loaded(llm, config.lora, _slots(config)):
        weights = llm.engine.runner.weight_bytes / 2**20
        yield lambda seed: iter([{"all": _mib(llm), "weights": weights, "slots": llm.adapters.num_bytes / 2**20}])


def _check_memory(off: Figures, on: Figures) -> list[Check]:
    ratio = on["all"] / off["all"]
    return [Check(f"{_HELD} adapters take less than 0.3 of the base model: {ratio:.2f} < 1.3", ratio < 1.3)]


# ---------------------------------------------------------------------- loading
@contextmanager
def _loading(config: EngineConfig, sizes: Sizes) -> Iterator[Measure]:
    """Streams with an adapter, and beside them requests that have another one each."""
    llm = AsyncLLM.from_config(config)
    with asyncio.Runner() as runner, _loaded(llm, config.lora, 1 + _LOADED) as adapters:
        tokens, names = tokens_of(llm), [adapter.lora_name for adapter in adapters]
        try:
            runner.run(_gaps(llm, sizes, Text(tokens, -1), names))  # whoever has room for all has them in slots now
            yield lambda seed: iter([runner.run(_gaps(llm, sizes, Text(tokens, seed), names))])
        finally:
            runner.run(llm.shutdown())


async def _gaps(llm: AsyncLLM, sizes: Sizes, text: Text, names: Sequence[str]) -> Figures:
    """Times between tokens of streams with the first adapter, while each of the others is asked for once."""
    gaps: list[float] = []
    waits: list[float] = []

    async def stream(number: int) -> None:
        newest = None
        prompt = text.window(sizes.stream[0])
        async for _ in llm.generate(prompt, exactly(sizes.stream[1]), f"stream-{number}", adapter=names[0]):
            now = time.perf_counter()
            if newest is not None:
                gaps.append(1e3 * (now - newest))
            newest = now

    async def others() -> None:
        for name in names[1:]:
            await asyncio.sleep(_PAUSE)
            began = time.perf_counter()
            async for _ in llm.generate(text.window(8), exactly(2), name, adapter=name):
                pass
            waits.append(1e3 * (time.perf_counter() - began))

    before = _num_loads(llm)
    async with asyncio.TaskGroup() as group:
        for number in range(sizes.streams):
            group.create_task(stream(number))
        group.create_task(others())
    return {
        "p99 gap": percentile(gaps, 99),
        "median gap": percentile(gaps, 50),
        "longest gap": max(gaps),
        "until an answer": percentile(waits, 50),
        "loads": _num_loads(llm) - before,
    }


def _num_loads(llm: AsyncLLM) -> int:
    adapters = llm.stats().adapters
    return 0 if adapters is None else adapters.load_seconds.cumulative()[-1][1]


def _check_loading(off: Figures, on: Figures) -> list[Check]:
    ratio = on["p99 gap"] / off["p99 gap"]
    return [
        Check(f"loading lengthens the 99th percentile by no more than 10 %: {ratio:.2f} ≤ 1.10", ratio <= 1.1),
        Check(f"adapters were loaded: {on['loads']:.0f} of {_LOADED}", on["loads"] >= _LOADED > off["loads"]),
    ]


_RATE = (Figure("tokens/s", "", True),)

LORA = (
    Claim(
        "lora-servers",
        "several fine-tunes: an engine each, or adapters of one",
        "engines",
        "adapters",
        lambda sizes, config: (_OFF, _on(sizes.tunes)),
        _servers,
        (Figure("weights and adapters", "MiB", False, 0), Figure("tokens/s", "", True)),
        _check_servers,
    ),
    Claim(
        "lora-unused",
        "requests without an adapter: where there are none, and where others could have one",
        "no adapters",
        "unused",
        lambda sizes, config: (_OFF, _on(_ROWS)),
        _unused,
        _RATE,
        _least(0.99, "adapters cost nothing where none is used"),
    ),
    Claim(
        "lora-mixed",
        f"{_ROWS} requests in a batch: one adapter for all, or {_ROWS}",
        "one adapter",
        f"{_ROWS} adapters",
        lambda sizes, config: (_on(1), _on(_ROWS)),
        _mixed,
        _RATE,
        _least(0.9, "a mixed batch is as fast, but for 10 %"),
    ),
    Claim(
        "lora-memory",
        f"memory of the base model, and of {_HELD} adapters for q and v beside it",
        "base model",
        f"{_HELD} adapters",
        lambda sizes, config: (
            {**_OFF, "warmup": False},
            _on(_HELD, warmup=False, lora_target_modules=("q_proj", "v_proj")),
        ),
        _memory,
        (Figure("all", "MiB", False, 0), Figure("weights", "MiB", False, 0), Figure("slots", "MiB", False, 0)),
        _check_memory,
    ),
    Claim(
        "lora-loading",
        f"gaps between tokens of streams while {_LOADED} adapters are asked for: all in slots, or all to be loaded",
        "resident",
        "loading",
        lambda sizes, config: (
            _on(1 + _LOADED),
            _on(_SLOTS, max_cpu_loras=1),
        ),
        _loading,
        (
            Figure("p99 gap", "ms", False),
            Figure("median gap", "ms", False),
            Figure("longest gap", "ms", False),
            Figure("until an answer", "ms", False),
            Figure("loads", "", True, 0),
        ),
        _check_loading,
    ),
)
