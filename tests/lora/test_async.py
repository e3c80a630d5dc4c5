"""Adapters of a serving engine: loaded by name when they are asked for, replaced and unloaded under way."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from jaxserve import AsyncLLM, EngineConfig, SamplingParams
from jaxserve.errors import ModelNotFoundError, RequestError
from tests.lora.adapters import edit_config, make_adapter, merged_tokens, write_base
from tests.lora.test_tokens import SETTINGS

PROMPT = list(range(10, 30))


async def whole(engine: AsyncLLM, name: str | None, count: int = 8) -> list[int]:
    """The output's tokens."""
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    tokens: list[int] = []
    async for output in engine.generate(PROMPT, params, f"{name}-{id(tokens)}", adapter=name):
        tokens += output.outputs[0].token_ids
        assert output.outputs[0].error is None
    return tokens


async def others_pass_a_slow_load(engine: AsyncLLM, expected: dict[str | None, list[int]]) -> None:
    """However many wait for files, base requests and those of loaded adapters are answered."""
    adapters: Any = engine.adapters
    arrived, prepare = threading.Event(), adapters.prepare
    adapters.prepare = lambda name: arrived.wait(60)
    waiting = [asyncio.create_task(whole(engine, f"far{i}")) for i in range(40)]
    try:
        await asyncio.sleep(0)
        async with asyncio.timeout(30):
            assert [await whole(engine, name) for name in ("a", None)] == [expected[name][:8] for name in ("a", None)]
    finally:
        arrived.set()
    ends = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(end, ModelNotFoundError) for end in ends)
    adapters.prepare = prepare


def test_adapters_come_and_go_while_the_engine_runs(tmp_path: Path) -> None:
    made = {name: make_adapter(tmp_path / name, seed) for seed, name in enumerate("ab")}
    base = write_base(tmp_path / "base.gguf")
    expected: dict[str | None, list[int]] = {
        name: merged_tokens(made.get(name or ""), [PROMPT], 40)[0] for name in ("a", "b", None)
    }

    async def play(engine: AsyncLLM) -> None:
        got = await asyncio.gather(*(whole(engine, name) for name in ("a", "b", None)))
        assert got == [expected[name][:8] for name in ("a", "b", None)]
        assert {info.slot for info in engine.adapters.infos()} == {1, 2}

        await others_pass_a_slow_load(engine, expected)
        long = asyncio.create_task(whole(engine, "a", 40))
        while not any(info.num_requests for info in engine.adapters.infos()):
            await asyncio.sleep(0.001)
        while not (stats := engine.stats().adapters) or stats.running != ("a",):
            await asyncio.sleep(0.001)
        assert (stats.num_slots, stats.waiting, stats.evictions_total) == (3, (), 0)
        assert stats.load_seconds.cumulative()[-1] == ("+Inf", 2)
        with pytest.raises(RequestError, match="is used by 1 requests"):
            engine.adapters.unload("a")
        # Replaced: the request that runs keeps its version, new ones have the other at once.
        await asyncio.to_thread(engine.adapters.load, "a", str(made["b"]), replace=True)
        assert await whole(engine, "a") == expected["b"][:8]
        assert await long == expected["a"]
        await asyncio.to_thread(engine.adapters.unload, "a", wait=5.0)
        shutil.rmtree(made["a"])
        with pytest.raises(ModelNotFoundError, match="there is no adapter 'a'"):
            await whole(engine, "a")
        edit_config(shutil.copytree(made["b"], tmp_path / "dora"), use_dora=True)
        with pytest.raises(RequestError, match="DoRA"):
            await whole(engine, "dora")
        assert engine.stats().num_running == engine.stats().num_waiting == 0

    async def main() -> None:
        settings: dict[str, Any] = {
            **SETTINGS,
            "max_num_batched_tokens": 8,
            "model": str(base),
            "max_loras": 3,
            "lora_dir": str(tmp_path),
        }
        engine = AsyncLLM.from_config(EngineConfig.from_flat(settings))
        try:
            await play(engine)
        finally:
            await engine.shutdown()

    asyncio.run(main())
