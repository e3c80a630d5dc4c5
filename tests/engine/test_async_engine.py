"""The engine thread beside an event loop: streams that are dropped, ids that come again, an engine that dies."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from jaxserve.config import ServerConfig
from jaxserve.engine import AsyncLLM
from jaxserve.errors import EngineDeadError, QueueFullError, RequestError
from jaxserve.outputs import TokenEvent
from jaxserve.sampling_params import SamplingParams, StructuredOutputsParams
from jaxserve.server import create_app
from tests.engine.tiny import greedy, start_tiny
from tests.server.serving import served
from tests.server.test_connections import wait_until

pytestmark = pytest.mark.anyio
PROMPT, OTHER = list(range(4, 20)), list(range(30, 39))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Gate:
    """Lets the engine's thread make as many steps as it is told, or any number."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._step = llm._engine.step
        self._free = False
        self._tickets = threading.Semaphore(0)
        llm._engine.step = self._wait  # type: ignore[method-assign]

    def open(self, steps: int | None = None) -> None:
        self._free |= steps is None
        self._tickets.release(steps or 1)

    def _wait(self) -> list[TokenEvent]:
        if not self._free:
            assert self._tickets.acquire(timeout=20)
        return self._step()


@asynccontextmanager
async def running(config: dict[str, Any] | None = None, **shape: Any) -> AsyncIterator[AsyncLLM]:
    llm = AsyncLLM(start_tiny(config, **shape))
    try:
        yield llm
    finally:
        await llm.shutdown()


async def collect(llm: AsyncLLM, prompt: list[int], name: str, params: SamplingParams) -> tuple[list[int], str | None]:
    tokens: list[int] = []
    reason = None
    async for output in llm.generate(prompt, params, name):
        tokens += output.outputs[0].token_ids
        reason = output.outputs[0].finish_reason
    return tokens, reason


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def test_dropped_streams_give_their_blocks_back() -> None:
    async with running() as llm:
        streams = [llm.generate([*PROMPT, i], greedy(70), f"r{i}") for i in range(20)]
        await asyncio.gather(*[anext(stream) for stream in streams[:8]])
        opening = [asyncio.create_task(anext(stream)) for stream in streams[8:]]
        await asyncio.sleep(0.02)
        for task in opening:
            task.cancel()
        await asyncio.gather(*opening, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
        await until(lambda: not llm._engine.has_work)
        stats = llm.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert stats.num_free_blocks == stats.num_blocks
        assert stats.generation_tokens_total < 20 * 70


async def test_an_id_that_comes_again_gets_nothing_of_the_dropped_request() -> None:
    async with running() as llm:
        want = await collect(llm, OTHER, "alone", greedy(20))
        gate = Gate(llm)
        first = llm.generate(PROMPT, greedy(60), "x")
        gate.open(2)
        await anext(first)
        await first.aclose()
        again = asyncio.create_task(collect(llm, OTHER, "x", greedy(20)))
        await until(lambda: len(llm._engine._inbox) == 2)  # the abort of the first, and the second
        gate.open()
        assert await again == want


async def test_an_abort_reaches_a_request_in_whatever_state_it_is() -> None:
    async with running() as llm:
        tokenising = asyncio.create_task(collect(llm, PROMPT, "x", greedy(70)))
        await asyncio.sleep(0)
        await llm.abort("x")
        assert (await tokenising)[1] == "abort"
        stream = llm.generate(PROMPT, greedy(70), "x")
        await anext(stream)
        await llm.abort("x")
        reasons = [output.outputs[0].finish_reason async for output in stream]
        assert reasons[-1] == "abort"
        await llm.abort("unknown")


async def test_the_queue_s_limit_holds_for_requests_that_come_within_one_step() -> None:
    async with running({"max_num_queued_reqs": 3}, max_rows=2, exact=True) as llm:
        gate = Gate(llm)
        asked = [asyncio.create_task(collect(llm, PROMPT, f"r{i}", greedy(4))) for i in range(30)]
        await asyncio.sleep(0.05)
        gate.open()
        results = await asyncio.gather(*asked, return_exceptions=True)
        assert [isinstance(result, QueueFullError) for result in results] == [False] * 5 + [True] * 25
        assert (await collect(llm, PROMPT, "later", greedy(4)))[1] == "length"


async def test_an_engine_that_fails_is_told_by_health_and_to_every_request() -> None:
    async with running() as llm:
        transport = httpx.ASGITransport(create_app(llm, ServerConfig()))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=10) as client:
            assert (await client.get("/health")).status_code == 200
            gate = Gate(llm)
            body = {"prompt": PROMPT, "max_tokens": 70}
            asked = [
                asyncio.create_task(client.post("/v1/completions", json=body | {"stream": stream}))
                for stream in (False, True)
            ]
            await until(lambda: len(llm._engine._inbox) == 2)
            gate.open(1)
            await until(lambda: llm.stats().num_running == 2)
            llm._engine.runner = None  # type: ignore[assignment]
            gate.open()
            plain, streamed = await asyncio.gather(*asked)
            assert plain.status_code == 503
            assert '"code":503' in streamed.text
            assert (await client.get("/health")).status_code == 503
            assert (await client.post("/v1/completions", json=body)).status_code == 503


def leave(url: str, body: dict[str, Any]) -> None:
    """A client that gives up."""
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/completions", json=body, timeout=0.25)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_forgotten_in_whatever_state_its_request_is(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = AsyncLLM(start_tiny())
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 70, "ignore_eos": True, "stream": stream}
    with served(llm, ServerConfig(port=0, sse_keep_alive_interval=0.0)) as url:
        compiling = threading.Event()
        compiled = llm._input.grammars._compile
        monkeypatch.setattr(llm._input.grammars, "_compile", lambda wanted: compiling.wait(20) and compiled(wanted))
        leave(url, {**body, "guided_regex": "a{30}"})
        wait_until(lambda: llm.stats().num_preparing == 0)
        compiling.set()
        gate = Gate(llm)
        leave(url, body)  # queued: no step is made
        long = {**body, "prompt": PROMPT * 3}
        asked = threading.Thread(target=leave, args=(url, long))
        asked.start()
        wait_until(lambda: bool(llm._streams))
        gate.open(1)  # a part of its prompt is computed
        asked.join()
        for _ in range(12):  # decoding, and then not a token more
            gate.open(1)
        leave(url, body)
        wait_until(lambda: llm._streams == {})
        gate.open()
        wait_until(lambda: not llm._engine.has_work)
        stats = llm.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert stats.num_free_blocks == stats.num_blocks
        ends = httpx.get(f"{url}/metrics").text
        assert 'request_success_total{engine="0",finished_reason="abort",model_name="tiny"} 4.0' in ends
        body |= {"max_tokens": 2, "stream": False}
        assert httpx.post(f"{url}/v1/completions", json=body).json()["usage"]["completion_tokens"] == 2
    asyncio.run(llm.shutdown())


async def test_steps_are_timed_by_kind_and_age_with_work_alone() -> None:
    async with running() as llm:
        assert llm.stats().last_step_age == 0
        await collect(llm, PROMPT, "a", greedy(5))
        await until(lambda: not llm._engine.has_work)
        stats = llm.stats()
        counts = {kind: timings.cumulative()[-1][1] for kind, timings in stats.step_seconds.items()}
        assert (counts["prefill"], counts["verify"], counts["mixed"]) == (1, 0, 0)
        assert counts["decode"] >= 4
        assert stats.step_seconds["decode"].total > 0
        gate = Gate(llm)
        asked = asyncio.create_task(collect(llm, PROMPT, "b", greedy(5)))
        await until(lambda: llm.stats().last_step_age > 0.05)
        gate.open()
        await asked
        await until(lambda: llm.stats().last_step_age == 0)


async def test_a_full_queue_tells_when_to_come_back() -> None:
    async with running({"max_num_queued_reqs": 1}, max_rows=2, exact=True) as llm:
        for index in range(40):
            await collect(llm, PROMPT, f"a{index}", greedy(1))
        assert llm._limits.seconds_per_end < 1
        llm._limits.seconds_per_end = 7.2
        gate = Gate(llm)
        asked = [asyncio.create_task(collect(llm, PROMPT, f"r{i}", greedy(4))) for i in range(4)]
        await asyncio.sleep(0.05)
        transport = httpx.ASGITransport(create_app(llm, ServerConfig()))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            refused = await client.post("/v1/completions", json={"prompt": PROMPT})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "8")
        gate.open()
        await asyncio.gather(*asked, return_exceptions=True)


async def test_output_that_cannot_be_processed_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as llm:

        def broken(events: list[TokenEvent]) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(llm._output, "process", broken)
        async with asyncio.timeout(10):
            with pytest.raises(EngineDeadError, match="ZeroDivisionError"):
                await collect(llm, PROMPT, "x", greedy(70))
        with pytest.raises(EngineDeadError):
            llm.check_health()
        await until(lambda: not llm._thread.is_alive())


async def test_preempted_requests_answer_as_they_do_alone() -> None:
    async with running(num_blocks=41) as llm:
        want = [await collect(llm, prompt, "alone", greedy(70)) for prompt in (PROMPT, OTHER)]
        # Two more requests take what is left of the forty blocks.
        asked = [(PROMPT, "a"), (OTHER, "b"), (PROMPT, "c"), (OTHER, "d")]
        got = await asyncio.gather(*[collect(llm, prompt, name, greedy(70)) for prompt, name in asked])
        assert got == want * 2
        assert llm.stats().preemptions_total > 0


async def test_an_output_with_a_structure() -> None:
    wanted = StructuredOutputsParams(regex="[0-9]{3}-[A-F]{2,4}")
    async with running() as llm:
        for seed in range(3):
            params = SamplingParams(structured_outputs=wanted, seed=seed, max_tokens=20, stop=["-ABCD"])
            tokens, reason = await collect(llm, [4, 5, 6], f"r{seed}", params)
            assert reason == "stop"
            assert re.fullmatch("[0-9]{3}-[A-F]{2,4}", llm.tokenizer.decode(tokens))
        bad = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[a-"))
        with pytest.raises(RequestError, match="regular expression is invalid"):
            await collect(llm, [4, 5, 6], "bad", bad)
        assert llm.stats().num_running == llm.stats().num_waiting == 0
