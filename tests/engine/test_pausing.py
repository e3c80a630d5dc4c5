"""An engine that is paused and goes on, and what it reads of prompts for asyncio."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from jaxserve.engine import AsyncLLM
from jaxserve.engine.reading import EMBEDDING
from jaxserve.errors import RequestError
from tests.engine.test_async_engine import OTHER, PROMPT, Gate, collect, running
from tests.engine.tiny import greedy

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def one_token_later(llm: AsyncLLM, gate: Gate) -> None:
    """Let the engine make steps until something runs."""
    while not llm.stats().num_running:
        gate.open(1)
        await asyncio.sleep(0.005)


async def test_running_requests_stand_still_end_or_finish() -> None:
    async with running() as llm:
        whole = await collect(llm, PROMPT, "a", greedy(30))
        other = await collect(llm, OTHER, "b", greedy(5))
        for how in ("keep", "wait", "abort"):
            gate = Gate(llm)
            first = asyncio.create_task(collect(llm, PROMPT, "a", greedy(30)))
            await one_token_later(llm, gate)
            pausing = asyncio.create_task(llm.pause(how))
            await asyncio.sleep(0.01)
            assert llm.is_paused
            second = asyncio.create_task(collect(llm, OTHER, "b", greedy(5)))
            gate.open()
            await asyncio.wait({pausing}, timeout=10)
            await asyncio.sleep(0.05)
            assert not second.done()
            assert first.done() == (how != "keep")
            await llm.resume()
            assert await second == other
            ended = await first
            assert ended == whole if how != "abort" else ended[1] == "abort"
        with pytest.raises(RequestError, match="mode must be one of"):
            await llm.pause("never")
        assert not llm.is_paused


async def test_who_waits_outside_can_be_aborted_and_the_cache_be_reset() -> None:
    async with running() as llm:
        await collect(llm, PROMPT, "a", greedy(3))
        await llm.pause()
        waiting = asyncio.create_task(collect(llm, PROMPT, "b", greedy(3)))
        await asyncio.sleep(0.01)
        assert llm.open_requests() == ["b"]
        await llm.abort("b")
        assert (await waiting)[1] == "abort"
        hits = llm.stats().prefix_hits_total
        assert await llm.reset_prefix_cache()
        await llm.resume()
        await collect(llm, PROMPT, "c", greedy(3))
        assert llm.stats().prefix_hits_total == hits
        gate = Gate(llm)
        busy = asyncio.create_task(collect(llm, OTHER, "d", greedy(20)))
        await one_token_later(llm, gate)
        resetting = asyncio.create_task(llm.reset_prefix_cache())
        gate.open()
        assert not await resetting
        await busy


async def test_a_frozen_engine_hears_of_aborts_and_resets_and_can_finish_instead() -> None:
    async with running() as llm, asyncio.timeout(20):
        whole = await collect(llm, OTHER, "b", greedy(30))
        gate = Gate(llm)
        ended = asyncio.create_task(collect(llm, PROMPT, "a", greedy(60)))
        kept = asyncio.create_task(collect(llm, OTHER, "b", greedy(30)))
        await one_token_later(llm, gate)
        await llm.pause("keep")
        gate.open()
        await llm.abort("a")
        assert (await ended)[1] == "abort"
        assert not await llm.reset_prefix_cache()
        assert not kept.done()
        await llm.pause("wait")
        assert await kept == whole


async def test_a_pause_does_not_wait_for_clients_that_do_not_read() -> None:
    async with running() as llm, asyncio.timeout(20):
        for how in ("wait", "abort"):
            stream = llm.generate(PROMPT, greedy(30), "a")
            await anext(stream)
            await llm.pause(how)
            assert llm.open_requests() == ["a"]
            assert llm.has_begun("a")
            await llm.resume()
            await stream.aclose()


async def test_who_asks_for_a_reset_and_leaves_does_no_harm() -> None:
    async with running() as llm:
        gate = Gate(llm)
        resetting = asyncio.create_task(llm.reset_prefix_cache())
        await asyncio.sleep(0.01)
        resetting.cancel()
        await asyncio.wait({resetting})
        gate.open()
        assert len((await collect(llm, PROMPT, "a", greedy(3)))[0]) == 3


async def test_embeddings_and_scores_come_from_the_same_engine() -> None:
    async with running() as llm:
        found = [out async for out in llm.generate(PROMPT, EMBEDDING, "e", pooling="last", stream=False)]
        assert len(found) == 1
        assert found[0].embedding is not None
        assert found[0].embedding.shape == (llm.hidden_size,)
        assert found[0].outputs[0].token_ids == []
        streamed = [out async for out in llm.generate(PROMPT, greedy(4, prompt_logprobs=1, n=2), "s")]
        told = [out.prompt_logprobs for out in streamed if out.prompt_logprobs is not None]
        assert [len(logprobs) for logprobs in told] == [len(PROMPT)]
        assert np.isfinite([entry.logprob for entries in told[0][1:] for entry in (entries or {}).values()]).all()
