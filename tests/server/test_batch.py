"""Files of requests."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import PlainTextResponse

from jaxserve.config import ServerConfig
from jaxserve.errors import ConfigError, JaxserveError, QueueFullError
from jaxserve.server import create_app
from jaxserve.server.batch import BatchReport, run_batch
from tests.server.fake import FakeEngine

pytestmark = pytest.mark.anyio

CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}


def line(custom_id: str, body: Any, **fields: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body} | fields)


async def run(engine: FakeEngine, folder: Path, *lines: str, concurrency: int = 4) -> tuple[BatchReport, list[Any]]:
    source, target = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text("\n".join(lines) + "\n", encoding="utf-8")
    app, seen = create_app(engine, ServerConfig()), []
    report = await run_batch(app, source, target, concurrency=concurrency, progress=lambda *state: seen.append(state))
    assert seen[-1] == (report.resumed + report.answered,) * 2
    assert not (folder / "out.jsonl.partial").exists()
    return report, [json.loads(text) for text in target.read_text(encoding="utf-8").splitlines()]


async def test_every_line_is_answered(tmp_path: Path) -> None:
    lines = [
        line("chat", CHAT),
        line("text", {"prompt": "x", "max_tokens": 5}, url="/v1/completions"),
        line("bad", {**CHAT, "temperature": -1}),
        line("other", {**CHAT, "model": "nope"}),
        line("nan", {**CHAT, "temperature": float("nan")}),
        line("stream", {**CHAT, "stream": True}),
        line("background", {"input": "x", "background": True}, url="/v1/responses"),
        line("get", CHAT, method="GET"),
        line("far", CHAT, url="http://evil.example/v1/x"),
        line("chat", CHAT),
        line("nothing", None),
        "{",
        "[1]",
        "",
    ]
    report, answers = await run(FakeEngine(), tmp_path, *lines)
    assert (report.answered, report.failed) == (13, 11)
    by_id = {answer["custom_id"]: answer for answer in answers if answer["custom_id"]}
    assert by_id["chat"]["response"]["body"]["choices"][0]["message"]["content"] == "Hello"
    assert by_id["chat"]["response"]["request_id"]
    assert by_id["text"]["response"]["body"]["choices"][0]["text"] == "Hello"
    assert by_id["bad"]["response"]["status_code"] == 400
    assert by_id["bad"]["response"]["body"]["error"]["param"] == "temperature"
    assert by_id["other"]["response"]["status_code"] == 404
    for name, words in (
        ("nan", "NaN"),
        ("stream", "stream has no place"),
        ("background", "background has no place"),
        ("get", "method must be POST"),
        ("far", "begins with /v1/"),
        ("nothing", "body must be an object"),
    ):
        assert by_id[name]["response"] is None
        assert words in by_id[name]["error"]["message"]
    faults = [answer["error"]["message"] for answer in answers if answer["custom_id"] is None]
    assert [text.split(":")[0] for text in sorted(faults)] == [
        "line 10",
        "line 12 is not valid JSON",
        "line 13 must be an object with a custom_id.",
    ]


async def test_no_more_at_once_than_allowed(tmp_path: Path) -> None:
    engine = FakeEngine(seconds_per_token=0.002)
    most = 0
    generate = engine.generate

    def watched(*args: Any, **options: Any) -> Any:
        nonlocal most
        most = max(most, 1 + len(engine.running) + len(engine.waiting))
        return generate(*args, **options)

    engine.generate = watched  # type: ignore[method-assign]
    report, _ = await run(engine, tmp_path, *(line(str(i), CHAT) for i in range(20)), concurrency=3)
    assert (report.answered, most) == (20, 3)


async def test_what_was_interrupted_goes_on(tmp_path: Path) -> None:
    engine = FakeEngine(seconds_per_token=0.01)
    lines = [line(str(i), CHAT) for i in range(12)]
    task = asyncio.create_task(run(engine, tmp_path, *lines, concurrency=2))
    partial = tmp_path / "out.jsonl.partial"
    while not partial.exists() or partial.read_text().count("\n") < 4:
        await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not engine.running
    assert not (tmp_path / "out.jsonl").exists()
    partial.write_text(partial.read_text() + '{"custom_id": "7", "resp', encoding="utf-8")
    asked = len(engine.submitted)
    report, answers = await run(engine, tmp_path, *lines)
    assert report.resumed >= 4
    assert len(engine.submitted) - asked == report.answered == 12 - report.resumed
    assert sorted(int(answer["custom_id"]) for answer in answers) == list(range(12))


async def test_a_full_queue_is_asked_again(tmp_path: Path) -> None:
    engine = FakeEngine()
    generate = engine.generate
    refused: list[Any] = []

    def full_at_first(*args: Any, **options: Any) -> Any:
        if not refused:
            refused.append(args)
            raise QueueFullError("1 requests are waiting; the limit is 1.")
        return generate(*args, **options)

    engine.generate = full_at_first  # type: ignore[method-assign]
    report, _ = await run(engine, tmp_path, line("a", CHAT))
    assert (report.answered, report.failed, len(refused)) == (1, 0, 1)


async def test_an_answer_that_is_no_json_is_kept_as_text(tmp_path: Path) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse("Success")(scope, receive, send)

    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(line("a", {}, url="/v1/load_lora_adapter"))
    await run_batch(app, source, target, concurrency=1, progress=lambda done, total: None)
    assert json.loads(target.read_text())["response"]["body"] == "Success"


async def test_an_engine_that_stops_ends_the_batch(tmp_path: Path) -> None:
    with pytest.raises(JaxserveError, match="the batch has stopped: the engine has stopped"):
        await run(FakeEngine(dies_at=2), tmp_path, line("a", CHAT))
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        await run_batch(
            create_app(FakeEngine(), ServerConfig()),
            tmp_path / "none",
            tmp_path / "out.jsonl",
            concurrency=1,
            progress=lambda done, total: None,
        )
