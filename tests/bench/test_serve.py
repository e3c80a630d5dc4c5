"""``jaxserve bench serve`` against servers on a socket: the project's own over a fake engine, and odd ones."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from jaxserve.bench.client import Client
from jaxserve.bench.datasets import Sample
from jaxserve.bench.load import send
from jaxserve.bench.options import ServeOptions
from jaxserve.bench.records import Record
from jaxserve.cli import main
from jaxserve.config import ServerConfig
from jaxserve.server import bind
from tests.server.fake import FakeEngine

pytestmark = pytest.mark.usefixtures("codec")
Serve = Callable[[FakeEngine], str]


def bench(url: str, *argv: str) -> int:
    return main(["bench", "serve", "--base-url", url, *argv])


def test_completions_of_text(serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine(seconds_per_token=0.002)
    result = tmp_path / "result.json"
    code = bench(
        serve(engine),
        *(
            "--num-prompts",
            "6",
            "--input-len",
            "20",
            "--output-len",
            "8",
            "--ignore-eos",
            "--result-filename",
            str(result),
        ),
        *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,99", "--goodput", "ttft:60000"),
    )
    assert code == 0
    out = capsys.readouterr().out
    assert "Successful requests:                                     6" in out
    assert "Total generated tokens:                                 48" in out
    assert "P99 E2EL (ms)" in out
    assert [len(asked["ids"]) for asked in engine.submitted] == [20] * 6
    assert all(asked["params"].ignore_eos and asked["params"].greedy for asked in engine.submitted)
    saved = json.loads(result.read_text())
    assert (saved["model_id"], saved["completed"], saved["failed"]) == ("fake-model", 6, 0)
    assert (saved["total_input_tokens"], saved["total_output_tokens"]) == (120, 48)
    assert saved["request_goodput"] == saved["request_throughput"] > 0
    assert 0 < saved["p50_ttft_ms"] <= saved["p99_ttft_ms"] <= saved["p99_e2el_ms"]
    assert saved["p50_tpot_ms"] > 0.5  # pieces may arrive together


def test_chats_of_a_trace_come_at_their_times(serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine()
    trace = tmp_path / "trace.jsonl"
    entries = [{"timestamp": 200 * i, "input_length": 10 + i, "output_length": 3} for i in range(3)]
    trace.write_text("\n".join(map(json.dumps, entries)))
    began = time.monotonic()
    argv = ("--dataset-name", "trace", "--dataset-path", str(trace), "--endpoint", "/v1/chat/completions")
    assert bench(serve(engine), *argv, "--trace-speedup", "0.5") == 0
    assert time.monotonic() - began >= 0.8
    assert "Successful requests:                                     3" in capsys.readouterr().out
    assert bytes(engine.submitted[0]["ids"]).startswith(b"<user>")


def test_no_more_requests_run_at_once_than_allowed(serve: Serve) -> None:
    engine = FakeEngine(seconds_per_token=0.005)
    most = 0
    original = engine._advance

    def watched(completion: Any) -> Any:
        nonlocal most
        most = max(most, len(engine.running))
        return original(completion)

    engine._advance = watched  # type: ignore[method-assign]
    argv = ("--num-prompts", "9", "--input-len", "5", "--output-len", "4", "--max-concurrency", "2")
    assert bench(serve(engine), *argv) == 0
    assert most == 2


def test_failures_are_counted_and_only_nothing_but_failures_is_one(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    url = serve(FakeEngine(max_running=1, max_queued=2, seconds_per_token=0.02))
    assert bench(url, "--num-prompts", "8", "--input-len", "5", "--output-len", "5") == 0
    out = capsys.readouterr().out
    assert "First error: 503: " in out
    assert "Failed requests:                                         0" not in out
    assert bench(url, "--num-prompts", "2", "--input-len", "600") == 1
    out = capsys.readouterr().out
    assert "Failed requests:                                         2" in out
    assert "First error: 400: This model's maximum context length is 512 tokens." in out
    assert bench(url, "--model", "other", "--num-prompts", "2", "--input-len", "5") == 1
    assert "First error: 404: the model 'other' does not exist" in capsys.readouterr().out


def test_a_request_that_takes_too_long_has_failed(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine(seconds_per_token=0.05)
    argv = ("--num-prompts", "2", "--input-len", "5", "--output-len", "400", "--timeout", "0.4", "--ignore-eos")
    assert bench(serve(engine), *argv) == 1
    assert "First error: no complete answer within 0.4 s" in capsys.readouterr().out
    deadline = time.monotonic() + 5
    while engine.running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine.aborted == 2


def test_an_engine_that_dies_midway_is_a_failure(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    url = serve(FakeEngine(dies_at=3, seconds_per_token=0.01))
    assert bench(url, "--num-prompts", "1", "--input-len", "5", "--output-len", "9") == 1
    assert "First error: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["--base-url", "http://127.0.0.1:1"], 1, "no answer from http://127.0.0.1:1: ConnectError"),
        (["--base-url", "nowhere"], 1, "no answer from nowhere"),
        (["--request-rate", "-1"], 2, "--request-rate must be greater than 0"),
        (["--request-rate", "1e-320"], 2, "--request-rate must be at least 1e-06"),
        (
            ["--dataset-name", "trace", "--dataset-path", "x", "--trace-speedup", "1e-320"],
            2,
            "--trace-speedup must be at",
        ),
        (["--dataset-name", "poems"], 2, "invalid choice: 'poems'"),
        (["--dataset-name", "trace"], 2, "--dataset-name trace needs --dataset-path"),
        (["--dataset-name", "trace", "--dataset-path", "x", "--request-rate", "2"], 2, "no effect with a trace"),
        (["--goodput", "speed:3"], 2, "--goodput must be like"),
        (["--goodput", "ttft:500", "ttft:900"], 2, "--goodput must name a metric once, got ttft twice"),
        (["--num-prompts", "0"], 2, "--num-prompts must be at least 1, got 0"),
        (["--dataset-name", "random", "--random-input-len", "1T"], 2, "--random-input-len must be at most 10000000"),
        (["--num-prompt", "3"], 2, "unknown flag --num-prompt. Did you mean '--num-prompts'?"),
        (["--result-filename", "/nowhere/x.json"], 2, "--result-filename must be a file in a folder that exists"),
    ],
)
def test_wrong_calls_are_told_in_one_line(
    argv: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        ended = main(["bench", "serve", *argv])
    except SystemExit as exit:
        ended = int(exit.code or 0)
    error = capsys.readouterr().err
    assert ended == code
    assert words in error
    assert error.count("\n") == 1


def test_a_file_that_is_not_there_is_told(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--dataset-name", "sharegpt", "--dataset-path", "/nowhere/talk.json")
    assert bench(serve(FakeEngine()), *argv) == 2
    assert "cannot read /nowhere/talk.json" in capsys.readouterr().err


def test_a_tokenizer_that_is_not_there_is_told(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.undo()
    assert bench(serve(FakeEngine())) == 2
    error = capsys.readouterr().err
    assert "There is no model 'fake-model'" in error
    assert error.endswith("Name the model's with --tokenizer.\n")


@contextmanager
def odd_server(
    answer: Callable[[], Response], models: Callable[[], Response] = lambda: Response("Not Found", 404)
) -> Iterator[str]:
    """A server that answers every completion in the same way, and whatever it is asked to list."""

    async def create(request: Request) -> Response:
        await request.body()
        return answer()

    config = ServerConfig(port=0)
    with bind(config) as sock:
        listing = Route("/v1/models", lambda request: models())
        app = Starlette(routes=[Route("/v1/completions", create, methods=["POST"]), listing])
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", ws="none"))
        thread = threading.Thread(target=server.run, args=([sock],))
        thread.start()
        while not server.started:
            time.sleep(0.005)
        yield "http://{}:{}".format(*sock.getsockname())
        server.should_exit = True
        thread.join()


def events(*chunks: dict[str, Any] | str) -> Callable[[], Response]:
    async def body() -> Any:
        for chunk in chunks:
            yield f"data: {chunk if isinstance(chunk, str) else json.dumps(chunk)}\r\n\r\n"
            await asyncio.sleep(0.01)

    return lambda: StreamingResponse(body(), media_type="text/event-stream")


def text(piece: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": piece, "finish_reason": finish}]}


def ask(url: str) -> Record:
    async def one() -> Record:
        async with Client(ServeOptions(base_url=url, model="m", timeout=10)) as client:
            assert await client.find_model() == "m"
            [record], _ = await send(client, [Sample((1, 2, 3), "abc", 3, 5)], [0.0], None)
        return record

    return asyncio.run(one())


def test_without_usage_pieces_of_text_are_counted() -> None:
    with odd_server(events(text(""), text("a"), text("b"), text("c"), text("", "stop"), "[DONE]")) as url:
        record = ask(url)
    assert record.error is None
    assert (record.num_prompt, record.num_output, len(record.pieces)) == (3, 3, 3)
    assert record.started < record.pieces[0] < record.pieces[-1] <= record.finished


def test_counts_of_the_server_are_believed() -> None:
    usage = {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 9}}
    with odd_server(events(text("ab"), text("c", "length"), usage, "[DONE]")) as url:
        record = ask(url)
    assert (record.num_prompt, record.num_output, len(record.pieces)) == (4, 9, 2)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (events(text("a"), text("b")), "the answer broke off"),
        (events(text("a"), {"error": {"message": "out of luck"}}), "out of luck"),
        (events("{nonsense"), "the answer is not like OpenAI's"),
        (events({"choices": 3}), "the answer is not like OpenAI's"),
        (events("[" * 100_000), "the answer is not like OpenAI's"),
        (
            events(text("a", "stop"), {"usage": {"prompt_tokens": None, "completion_tokens": 1}}),
            "prompt_tokens is None",
        ),
        (lambda: Response("x" * 1000, status_code=500), "500: xxx"),
    ],
)
def test_odd_answers_are_failures(answer: Callable[[], Response], words: str) -> None:
    with odd_server(answer) as url:
        error = ask(url).error
    assert error is not None
    assert words in error
    assert len(error) <= 300


def test_separators_within_a_text_end_no_line() -> None:
    event = json.dumps(text("a\u2028b\x85", "stop"), ensure_ascii=False)
    with odd_server(events(event)) as url:
        assert ask(url).error is None


def test_a_port_that_cannot_be_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("http://127.0.0.1:99999", "--num-prompts", "1") == 2
    assert "--base-url 'http://127.0.0.1:99999' is no URL" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (500, '{"error": {"message": "the shelf is empty."}}', "(500: the shelf is empty); name one with --model."),
        (401, '{"error": {"message": "no key"}}', "(401: no key); its key is --api-key."),
        (502, "x" * 1000, "x); name one with --model."),
    ],
)
def test_why_a_server_lists_no_model_is_told(
    status: int, body: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with odd_server(events(), models=lambda: Response(body, status)) as url:
        assert bench(url, "--num-prompts", "1") == 1
    error = capsys.readouterr().err
    assert words in error
    assert len(error) < 450


def test_half_a_character_in_a_file_is_the_fault_of_its_line(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = tmp_path / "talk.jsonl"
    turns = [{"value": "hello"}, {"value": "an answer \ud83d"}]
    talk.write_text(f"{json.dumps({'conversations': turns[:1] * 2})}\n{json.dumps({'conversations': turns})}\n")
    engine = FakeEngine()
    assert bench(serve(engine), "--dataset-name", "sharegpt", "--dataset-path", str(talk)) == 2
    assert f"{talk}, line 2 holds a lone surrogate, \\ud83d, in its text" in capsys.readouterr().err
    assert not engine.submitted


def test_a_server_that_lists_no_model_needs_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    with odd_server(events(text("a", "stop"))) as url:
        assert bench(url, "--num-prompts", "1") == 1
        assert "lists no model (404: Not Found); name one with --model" in capsys.readouterr().err
        assert bench(url, "--num-prompts", "1", "--input-len", "5", "--model", "m") == 0
