"""``/debug/live`` and ``/debug/requests`` over the fake engine: who looks, how fast, who is slow, who leaves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import httpx
import pytest

from jaxserve.request import FinishReason
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.live import Live
from tests.server.fake import FakeEngine
from tests.server.looking import Map, read_events
from tests.server.test_connections import wait_until
from tests.server.test_errors import error_of

pytestmark = pytest.mark.anyio

Serve = Callable[..., str]


def text_of(event: dict[str, Any]) -> str:
    return event["lines"].decode()


async def test_one_snapshot_serves_all_who_look_and_none_is_taken_for_nobody() -> None:
    engine = FakeEngine()
    live = Live(engine, "m")
    viewers = [live.events(0.1) for _ in range(10)]
    for viewer in viewers:
        first = text_of(await anext(viewer))
        assert first.startswith("event: start\ndata: {")
        assert "\n\nevent: state\ndata: {" in first
    before = engine.live.num_snapshots
    states = {text_of(await anext(viewer)) for viewer in viewers for _ in range(3)}
    assert len(states) < 10  # of 30: the same for all, though some may have come a state later
    assert engine.live.num_snapshots - before < 10
    assert engine.live.num_watchers == 1
    slower = live.events(0.11)
    assert '"interval":0.25' in text_of(await anext(slower))
    assert engine.live.num_watchers == 2
    for viewer in (*viewers, slower):
        await viewer.aclose()
    assert live.num_viewers == 0
    async with asyncio.timeout(10):
        while engine.live.num_watchers:
            await asyncio.sleep(0.01)
    taken = engine.live.num_snapshots
    await asyncio.sleep(0.3)
    assert engine.live.num_snapshots == taken


async def test_who_is_behind_starts_anew_and_sees_the_same() -> None:
    engine = FakeEngine(seconds_per_token=0.01)
    live = Live(engine, "m")
    asked = asyncio.create_task(collect(engine))
    slow, quick = Map(), Map()
    async with aclosing(live.events(0.1)) as lagging, aclosing(live.events(0.1)) as prompt:
        slow.read(text_of(await anext(lagging)))
        quick.read(text_of(await anext(prompt)))
        for _ in range(7):
            quick.read(text_of(await anext(prompt)))
        again = text_of(await anext(lagging))
        assert again.startswith("event: start")
        slow.read(again)
        assert (slow.owners == quick.owners).all()
        assert (slow.refs == quick.refs).all()
        assert slow.state["time"] == quick.state["time"]
        assert slow.num_used > 0
        assert text_of(await anext(lagging)).startswith("event: state")
    asked.cancel()


async def collect(engine: FakeEngine) -> None:
    async for _ in engine.generate("x" * 40, SamplingParams(max_tokens=400), "a-0"):
        pass


async def test_too_many_viewers_and_intervals_that_are_none(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for text in ("99", "10001", "x", "", "1e3", "-250", "250.5", "\uff19" * 3):
        assert error_of(await client.get("/debug/live", params={"interval": text}), 400)["param"] == "interval"
    live = Live(engine, "m")
    viewers = [live.events(10) for _ in range(64)]
    for viewer in viewers:
        await anext(viewer)
    with pytest.raises(Exception, match="64 look at"):
        await anext(live.events(10))
    for viewer in viewers:
        await viewer.aclose()


async def test_who_does_not_read_does_not_keep_an_error_for_others() -> None:
    engine = FakeEngine()
    live = Live(engine, "m")
    stuck = live.events(0.1)
    await anext(stuck)
    live._channels[0.1]._painter.draw = None  # type: ignore[assignment, method-assign]
    async with asyncio.timeout(10):
        while engine.live.num_watchers:
            await asyncio.sleep(0.01)
    async with aclosing(live.events(0.1)) as newcomer:
        assert text_of(await anext(newcomer)).startswith("event: start")
        with pytest.raises(TypeError):
            await anext(stuck)
        assert live.num_viewers == 1
        assert text_of(await anext(newcomer)).startswith("event: state")


async def test_an_engine_that_dies_ends_the_streams_with_an_error(serve: Serve) -> None:
    engine = FakeEngine()
    url = serve(engine)
    events = []
    async with httpx.AsyncClient(timeout=10) as client:
        async with client.stream("GET", f"{url}/debug/live?interval=100") as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            async for event in read_events(response):
                events.append(event)
                engine.dead = "the engine has stopped: test"
        assert [name for name, _ in events[:2]] == ["start", "state"]
        assert events[-1][0] == "error"
        assert events[-1][1]["error"]["message"].startswith("the engine has stopped")
        assert engine.live.num_watchers == 0
        assert (await client.get(f"{url}/debug/live")).status_code == 503


def test_head_is_answered_and_leaves_the_connection_to_others(serve: Serve) -> None:
    engine = FakeEngine()
    with httpx.Client(base_url=serve(engine), timeout=3, limits=httpx.Limits(max_connections=1)) as client:
        head = client.head("/debug/live")
        assert (head.status_code, head.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        assert client.get("/health").status_code == 200
        assert engine.live.num_watchers == 0
        assert client.head("/debug/live?interval=1").status_code == 400


def test_a_viewer_that_hangs_up_is_forgotten_and_counts_nowhere(serve: Serve) -> None:
    engine = FakeEngine()
    url = serve(engine, api_key=("k",), max_concurrency_per_key=1)
    headers = {"authorization": "Bearer k"}
    with httpx.Client(timeout=10, headers=headers) as client:
        with client.stream("GET", f"{url}/debug/live?interval=100") as response:
            lines = response.iter_lines()
            assert next(lines) == "event: start"
            assert engine.live.num_watchers == 1
            # A key that looks can still ask.
            assert httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, headers=headers).status_code == 200
        wait_until(lambda: engine.live.num_watchers == 0)
        assert httpx.get(f"{url}/debug/live").status_code == 401
        assert httpx.get(f"{url}/debug/requests").status_code == 401
        metrics = client.get(f"{url}/metrics").text
        assert 'client_disconnects_total{engine="0",model_name="fake-model",stage="streaming"} 0.0' in metrics


def test_a_signal_ends_live_streams_at_once(start: Callable[..., Any]) -> None:
    process, url = start(0.0, shutdown_timeout=30)
    lines: list[str] = []

    def look() -> None:
        with httpx.stream("GET", f"{url}/debug/live?interval=100", timeout=30) as response:
            for line in response.iter_lines():
                lines.append(line)

    viewer = threading.Thread(target=look)
    viewer.start()
    wait_until(lambda: bool(lines))
    process.terminate()
    viewer.join(15)
    assert process.wait(15) == 0  # long before the 30 s in which requests may end
    assert "event: error" not in lines
    assert lines[0] == "event: start"


async def test_requests_by_any_of_their_ids(client: httpx.AsyncClient) -> None:
    body = {"prompt": "x" * 20, "max_tokens": 5, "n": 2}
    response = await client.post("/v1/completions", json=body, headers={"x-request-id": "my/own"})
    answer = response.json()
    listed = (await client.get("/debug/requests")).json()
    assert listed == {"running": [], "waiting": [], "finished": [answer["id"]]}
    found = [(await client.get(f"/debug/requests/{id}")).json() for id in (answer["id"], answer["id"] + "-0", "my/own")]
    assert found[0] == found[1] == found[2]
    assert found[0]["id"] == answer["id"]
    assert found[0]["state"] == "finished"
    assert found[0]["finish_reason"] == "length"
    assert found[0]["prompt_tokens"] == 20
    assert found[0]["misses"] == {"cold": 20}
    assert found[0]["output_tokens"] == 10
    assert [part["output_tokens"] for part in found[0]["completions"]] == [5, 5]
    assert sum(seconds for name, seconds in found[0]["times"].items() if name != "total") == pytest.approx(
        found[0]["times"]["total"], abs=1e-5
    )
    two = (await client.post("/v1/completions", json={"prompt": ["x", "yy"], "max_tokens": 3})).json()
    whole, second = [(await client.get(f"/debug/requests/{two['id']}{suffix}")).json() for suffix in ("", "-1")]
    assert (whole["prompt_tokens"], whole["output_tokens"], len(whole["completions"])) == (3, 6, 2)
    assert (second["prompt_tokens"], second["completions"]) == (2, [])
    assert error_of(await client.get("/debug/requests/none"), 404)["type"] == "NotFoundError"


async def test_the_ring_of_finished_requests_is_bounded(engine: FakeEngine) -> None:
    journal = engine.live.journal
    for index in range(1100):
        entry = journal.open(f"r{index}-0")
        entry.queue(engine.live.make(entry.id, [1], SamplingParams()))
        journal.close(entry, FinishReason.STOP)
    refused = journal.open("refused-0")
    journal.close(refused, FinishReason.ABORT)
    assert [report.id for report in journal.finished] == [f"r{index}-0" for index in reversed(range(100, 1100))]
    assert journal.entries == {}
