"""What a real engine shows of itself over real sockets, and what it knows of a request to which everything happened."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from jaxserve.config import ServerConfig
from jaxserve.engine import AsyncLLM
from jaxserve.errors import EngineDeadError
from jaxserve.outputs import TokenEvent
from jaxserve.request import FinishReason
from jaxserve.sampling_params import SamplingParams
from tests.engine.test_async_engine import OTHER, PROMPT, Gate, collect, running, until
from tests.engine.tiny import greedy
from tests.equivalence.test_speculation import ITSELF
from tests.server.looking import Map, read_events
from tests.server.serving import served

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def looking(client: httpx.AsyncClient, interval: int = 100) -> AsyncIterator[AsyncIterator[tuple[str, Any]]]:
    async with client.stream("GET", f"/debug/live?interval={interval}") as response:
        assert response.status_code == 200
        yield read_events(response)


@asynccontextmanager
async def serving(config: dict[str, Any] | None = None, **shape: Any) -> AsyncIterator[tuple[AsyncLLM, Any]]:
    async with running(config, **shape) as llm:
        with served(llm, ServerConfig(port=0)) as url:
            async with httpx.AsyncClient(base_url=url, timeout=20) as client:
                yield llm, client


async def ask(client: httpx.AsyncClient, prompt: list[int], max_tokens: int, **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **more}
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def test_maps_agree_with_counts_and_with_each_other_under_load() -> None:
    async with serving(num_blocks=61) as (llm, client):
        slow_down(llm)
        seen = Map()
        most_refs = most_used = 0
        steps: list[Any] = []
        async with looking(client) as events:
            for _ in range(2):
                seen.take(*await anext(events))
            jobs = [asyncio.create_task(ask(client, [*PROMPT, *PROMPT, i], 40, request_id=f"r{i}")) for i in range(10)]
            while not all(job.done() for job in jobs):
                seen.take(*await anext(events))
                steps += seen.state["steps"]
                seen.check()
                most_refs = max(most_refs, int(seen.refs.max()))
                most_used = max(most_used, seen.num_used)
                async with looking(client) as others:
                    fresh = Map()
                    for _ in range(2):
                        fresh.take(*await anext(others))
                    fresh.check()
                while seen.state["time"] < fresh.state["time"]:
                    seen.take(*await anext(events))
                if seen.state["time"] == fresh.state["time"]:
                    assert (seen.owners == fresh.owners).all()
                    assert (seen.refs == fresh.refs).all()
            answers = await asyncio.gather(*jobs)
            async with asyncio.timeout(10):
                while seen.num_used or seen.state["counts"]["generation_tokens"] < 400:
                    seen.take(*await anext(events))
        assert all(len(step) == 8 for step in steps)
        assert [step[0] for step in steps] == sorted({step[0] for step in steps})
        assert {step[2] for step in steps} <= {"decode", "prefill", "mixed"}
        assert most_refs >= 2  # the prompts' common blocks
        assert most_used > 10
        assert seen.num_used == 0
        assert seen.state["requests"] == []
        assert seen.state["counts"]["generation_tokens"] == 400
        assert seen.state["latency"]["ttft"]["count"] == 10
        assert seen.state["latency"]["itl"]["count"] > 300
        assert seen.about["num_blocks"] == 60
        assert seen.about["block_bytes"] == 2 * 2 * 4 * 2 * 16 * 4
        listed = (await client.get("/debug/requests")).json()
        assert set(listed["finished"]) == {answer["id"] for answer in answers}
        await until(lambda: llm._engine.recorder is None)


def slow_down(llm: AsyncLLM) -> None:
    step = llm._engine.step

    def slow() -> list[TokenEvent]:
        time.sleep(0.004)
        return step()

    llm._engine.step = slow  # type: ignore[method-assign]


async def test_an_engine_without_work_paused_or_dead_is_shown_as_it_is() -> None:
    async with serving() as (llm, client):
        await ask(client, PROMPT, 3)
        num_steps = llm.stats().steps_total
        async with looking(client) as events:
            seen = Map()
            for _ in range(4):
                seen.take(*await anext(events))
            seen.check()
            assert seen.state["counts"]["cached"] > 0
            assert seen.state["steps"] == []
            assert llm.stats().steps_total == num_steps
            gate = Gate(llm)
            job = asyncio.create_task(ask(client, OTHER, 60))
            await until(lambda: any(entry.requests for entry in tuple(llm.live.journal.entries.values())))
            for _ in range(4):
                gate.open(1)
            await until(lambda: llm.stats().num_running == 1)
            await client.post("/pause?mode=keep")
            gate.open()
            late = asyncio.create_task(ask(client, OTHER, 2))
            while seen.num_used == 0 or seen.state["counts"]["preparing"] == 0:
                seen.take(*await anext(events))
            seen.check()
            assert [row["state"] for row in seen.state["requests"]] == ["running", "preparing"]
            (id,) = (await client.get("/debug/requests")).json()["running"]
            report = (await client.get(f"/debug/requests/{id}")).json()
            assert report["state"] == "running"
            assert len(report["block_table"]) == seen.num_used
            await client.post("/resume")
            await asyncio.gather(job, late)
            llm._engine.scheduler.plan = None  # type: ignore[method-assign, assignment]
            last = [event async for event in events][-1]
        assert last[0] == "error"
        assert (await client.get("/debug/live")).status_code == 503
        assert (await client.get(f"/debug/requests/{id}")).json()["state"] == "finished"


async def snapshots_without_end(llm: AsyncLLM) -> None:
    while True:
        await llm.live.snapshot()


async def test_snapshots_need_no_viewer_s_patience() -> None:
    async with running() as llm:
        with llm.live.watched():
            assert (await llm.live.snapshot()).num_requests == 0
            gate = Gate(llm)
            waiting = asyncio.create_task(llm.live.snapshot())
            await asyncio.sleep(0.01)
            waiting.cancel()
            await asyncio.wait({waiting})
            gate.open()
            assert (await collect(llm, PROMPT, "a", greedy(3)))[1] == "length"
            llm._engine.scheduler.plan = None  # type: ignore[method-assign, assignment]
            with pytest.raises(EngineDeadError):
                await snapshots_without_end(llm)
        assert llm._engine.recorder is None
        assert llm._output.latency is None


async def test_figures_of_a_request_to_which_everything_happened() -> None:
    """In chunks, behind a cached prefix, preempted by memory, and with drafts of which all are right."""
    async with serving(num_blocks=41, max_tokens=16, proposer=ITSELF) as (llm, client):
        long = [*range(4, 44)]
        first = await ask(client, long[:12], 4)
        prompts = [[*long[:12], 50 + i, *long[12:]] for i in range(3)]
        answers = await asyncio.gather(*[ask(client, prompt, 50) for prompt in prompts])
        assert llm.stats().preemptions_total > 0
        found = [(await client.get(f"/debug/requests/{answer['id']}")).json() for answer in [first, *answers]]
        assert found[0]["chunks"] == [12]
        assert found[0]["misses"] == {"cold": 12}
        for answer, report in zip(answers, found[1:], strict=True):
            usage = answer["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert report["prompt_tokens"] == usage["prompt_tokens"] == 41
            assert report["cached_tokens"] == cached >= 12
            assert sum(report["misses"].values()) == 41 - cached
            assert report["output_tokens"] == usage["completion_tokens"] == 50
            assert max(report["chunks"]) <= 16
            assert sum(report["chunks"]) >= 41 - cached
            if not report["preemptions"]:
                assert sum(report["chunks"]) == 41 - cached
                assert report["recomputed_tokens"] == 0
            drafts = report["drafts"]
            assert 0 < drafts["accepted"] == sum(drafts["accepted_by_position"]) <= drafts["proposed"]
            assert report["times"]["total"] == pytest.approx(
                sum(seconds for name, seconds in report["times"].items() if name != "total"), abs=1e-4
            )
            assert report["block_table"] == []
        stats = llm.stats()
        assert sum(report["preemptions"] for report in found) == stats.preemptions_total
        assert sum(report["recomputed_tokens"] for report in found) == stats.recomputed_tokens_total > 0
        assert sum(report["drafts"]["proposed"] for report in found) == stats.speculation.num_draft_tokens
        victim = max(found, key=lambda report: report["preemptions"])
        assert sum(victim["chunks"]) > 41 - victim["cached_tokens"]


async def test_a_text_that_ends_it_and_a_client_that_leaves() -> None:
    async with running() as llm:
        tokens = (await collect(llm, PROMPT, "a", greedy(20)))[0]
        stop = llm.tokenizer.decode(tokens[8:10])
        async for output in llm.generate(PROMPT, greedy(20, stop=[stop]), "b", stream=False):
            answered = output
        slow_down(llm)
        stream = llm.generate(PROMPT, greedy(60), "c")
        await anext(stream)
        (entry,) = llm.live.journal.entries.values()
        assert entry.report().parts[0].state == "running"
        await stream.aclose()
        left, stopped, whole = list(llm.live.journal.finished)
        assert [report.parts[0].finish_reason for report in (left, stopped, whole)] == ["abort", "stop", "length"]
        assert stopped.parts[0].output_tokens == len(answered.outputs[0].token_ids) < 20


async def test_a_completion_that_waits_for_its_sibling_has_ended() -> None:
    async with running() as llm:
        gate = Gate(llm)
        params = SamplingParams(n=2, temperature=1.0, seed=1, max_tokens=60, ignore_eos=True)
        job = asyncio.create_task(anext(llm.generate(PROMPT, params, "a", stream=False)))
        await until(lambda: any(entry.requests for entry in llm.live.journal.entries.values()))
        (entry,) = llm.live.journal.entries.values()
        first = entry.requests[0]
        assert [(part.state, part.forked) for part in entry.report().parts] == [("waiting", False)] * 2
        while llm.stats().num_running < 2 or not first.output:
            gate.open(1)
            await asyncio.sleep(0.005)
        llm._engine.finish(first.id, FinishReason.STOP)  # as its text does
        gate.open(1)
        await until(lambda: first.finish is not None)
        ended, other = entry.report().parts
        assert (ended.state, ended.finish_reason, ended.output_tokens) == ("finished", "stop", len(first.output))
        assert 0 < ended.first_token_at <= ended.ended_at == first.ended_at
        assert (other.state, other.forked, ended.forked) == ("running", True, False)
        gate.open()
        await job
