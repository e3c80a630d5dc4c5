"""Requests that take too long: refused, ended, counted, and out of the engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.server.fake import FakeEngine
from tests.server.test_connections import wait_until
from tests.server.test_errors import error_of

Serve = Callable[..., str]


def ask(url: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 400, **body}, timeout=10)


def counted(url: str, stage: str) -> bool:
    line = f'jaxserve:request_timeouts_total{{engine="0",model_name="fake-model",stage="{stage}"}} 1.0'
    return line in httpx.get(f"{url}/metrics").text


@pytest.mark.parametrize("stream", [False, True])
def test_no_first_token_in_time(serve: Serve, stream: bool) -> None:
    engine = FakeEngine(max_running=0)
    url = serve(engine, ttft_timeout=0.1, request_timeout=5.0)
    response = ask(url, stream=stream)
    error = error_of(response, 503)
    assert error["message"] == "the request has no first token after 0.1 s (--ttft-timeout)."
    assert response.headers["retry-after"] == "1"
    assert (engine.aborted, engine.waiting) == (1, set())
    assert counted(url, "first_token")


def test_a_plain_answer_that_has_begun_may_go_on(serve: Serve) -> None:
    engine = FakeEngine(seconds_per_token=0.02)
    url = serve(engine, ttft_timeout=0.1)
    assert ask(url, max_tokens=10).json()["usage"]["completion_tokens"] == 10
    assert ask(url, max_tokens=10, stream=True).text.endswith("[DONE]\n\n")
    assert engine.aborted == 0


def test_a_stream_that_has_told_something_has_begun(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(seconds_per_token=0.02)
    monkeypatch.setattr(engine, "has_begun", lambda request_id: False)  # as of one that ended before it was all read
    url = serve(engine, ttft_timeout=0.1)
    text = ask(url, max_tokens=10, stream=True).text
    assert '"finish_reason":"length"' in text
    assert "error" not in text
    assert engine.aborted == 0


def test_an_answer_that_is_not_finished_in_time(serve: Serve) -> None:
    engine = FakeEngine(seconds_per_token=0.02)
    url = serve(engine, request_timeout=0.2)
    error = error_of(ask(url), 504)
    assert (error["type"], error["message"]) == (
        "TimeoutError",
        "the request is not finished after 0.2 s (--request-timeout).",
    )
    assert counted(url, "generation")
    *chunks, last, done = ask(url, stream=True).text.strip().split("\n\n")
    assert len(chunks) > 3
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == 504
    assert done == "data: [DONE]"
    wait_until(lambda: not engine.running)
    assert engine.aborted == 2


def test_one_late_prompt_of_several_ends_the_others(serve: Serve) -> None:
    engine = FakeEngine(max_running=1, seconds_per_token=0.01)
    url = serve(engine, ttft_timeout=0.15)
    error_of(ask(url, prompt=["a", "b"]), 503)
    wait_until(lambda: not engine.running)
    assert engine.aborted == 2
