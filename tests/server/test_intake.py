"""Large bodies: read in another process, the same answers, and the event loop free meanwhile."""

from __future__ import annotations

import json
import operator
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from jaxserve.config import ServerConfig
from jaxserve.errors import RequestError
from jaxserve.server import intake
from jaxserve.server.helper import Helper
from jaxserve.server.intake import LARGE
from tests.server.fake import FakeEngine, FakeTokenizer
from tests.server.serving import served
from tests.server.test_errors import error_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
CONTEXT = 60_000


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine(max_model_len=CONTEXT)


@pytest.fixture(scope="module")
def client(engine: FakeEngine) -> Iterator[httpx.Client]:
    """One server for all tests, as its other process takes a second to start."""
    with served(engine, ServerConfig(port=0)) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def chat_of(num_messages: int) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": f"message {i} wörld"} for i in range(num_messages)]
    return {"messages": messages, "max_tokens": 5}


def test_a_large_chat_is_answered_like_a_small_one(client: httpx.Client, engine: FakeEngine) -> None:
    body = chat_of(1000)
    assert len(json.dumps(body)) > LARGE
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    for stream in (False, True):
        extra = {"stream": stream, "temprature": 1, "tools": [tool], "chat_template_kwargs": {"k": 1}}
        response = client.post(CHAT, json={**body, **extra})
        assert response.status_code == 200
        assert response.headers["x-jaxserve-ignored"] == "temprature"
        assert ('"H"' if stream else "Hello") in response.text
        assert list(engine.submitted[-1]["ids"]) == FakeTokenizer().apply_chat_template(
            [{"role": m["role"], "content": m["content"]} for m in body["messages"]], tools=[tool], k=1
        )


def test_large_prompts_are_answered_like_small_ones(client: httpx.Client, engine: FakeEngine) -> None:
    text = "wörld " * 6000
    for prompt, wanted in (
        (text, list(text.encode())),
        ([7] * 50_000, [7] * 50_000),
        ([text, "x"], list(text.encode())),
    ):
        answer = client.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 5}).json()
        assert answer["choices"][0]["text"] == "Hello"
        num = sum(1 for _ in answer["choices"])
        assert any(list(s["ids"]) == wanted for s in engine.submitted[-num:])
    answer = client.post(COMPLETIONS, json={"prompt": text, "echo": True, "max_tokens": 5}).json()
    assert answer["choices"][0]["text"] == text + "Hello"


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "x" * 70_000}]}, "messages", "contains 70020 input tokens"),
        (COMPLETIONS, {"prompt": "x" * 70_000}, "prompt", "contains 70000 input tokens"),
        (COMPLETIONS, {"prompt": [1] * 70_000}, "prompt", "contains 70000 input tokens"),
        (COMPLETIONS, {"prompt": [1] * 20_000 + [10**30]}, "prompt", "outside the vocabulary"),
        (COMPLETIONS, {"prompt": [1] * 20_000 + [-5]}, "prompt", "token id -5 is outside the vocabulary"),
        (COMPLETIONS, {"prompt": [1] * 20_000 + [1.5]}, "prompt", "must be a string"),
        (COMPLETIONS, {"prompt": "x" * 40_000, "temperature": -1}, "temperature", "temperature"),
        (COMPLETIONS, {"prompt": "x" * 40_000, "model": "fake-modle"}, "model", "Did you mean 'fake-model'?"),
        (CHAT, {"messages": [{"role": "user", "content": 5}] * 2000}, "messages.0.content", "messages.0.content"),
        (COMPLETIONS, {"prompt": "x", "guided_json": {"a": "y" * 2**21}}, None, "beside the prompt take"),
    ],
)
def test_large_bodies_are_refused_by_name(
    client: httpx.Client, path: str, body: dict[str, Any], param: str | None, message: str
) -> None:
    for stream in (False, True):
        error = error_of(client.post(path, json={**body, "stream": stream}), 404 if param == "model" else 400)
        assert error["param"] == param
        assert message in error["message"]


def test_bad_json_is_refused_there_too(client: httpx.Client) -> None:
    for body in (b"{" + b" " * 40_000, b"[" * 100_000, b'{"prompt": "' + b"\\ud83d" * 10_000 + b'"}', b"\xff" * 40_000):
        error_of(client.post(COMPLETIONS, content=body, headers={"content-type": "application/json"}))


def test_the_loop_is_free_while_a_huge_body_is_read(client: httpx.Client) -> None:
    huge = json.dumps(chat_of(100_000)).encode()
    assert 4 * 2**20 < len(huge) < 16 * 2**20
    waits: list[float] = []
    done = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=client.base_url) as other:
            while not done.is_set():
                began = time.perf_counter()
                other.get("/health")
                waits.append(time.perf_counter() - began)
                time.sleep(0.01)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        response = client.post(CHAT, content=huge, headers={"content-type": "application/json"})
    finally:
        done.set()
        thread.join()
    assert "input tokens" in error_of(response)["message"]
    waits.sort()
    assert len(waits) > 20
    # Parsing it takes seconds. The whole machine may be busy: most waits are short, and none is as long as that.
    assert waits[len(waits) // 2] < 0.05
    assert waits[-1] < 0.5


def test_a_process_that_died_is_replaced() -> None:
    helper = Helper({"a": 1})
    try:
        assert helper.call(operator.contains, [b"", b"a"]) is False
        process = helper._process
        assert process is not None
        process.kill()
        process.wait()
        with pytest.raises(RuntimeError, match="has failed:\nTraceback"):
            helper.call(operator.add, [b"a"])
        assert helper._process is not process
    finally:
        helper.close()


def test_signals_leave_the_process_alone_and_closing_does_not_wait_for_it() -> None:
    helper = Helper(None)
    errors: list[Exception] = []

    def ask() -> None:
        try:
            helper.call(_sleep, [b"30"])
        except RuntimeError as error:
            errors.append(error)

    assert helper.call(_sleep, [b"0"]) is None
    assert helper._process is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        helper._process.send_signal(number)
    assert helper.call(_sleep, [b"0.1"]) is None
    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(0.1)
    helper.close()
    asking.join(timeout=5)
    assert not asking.is_alive()
    assert "has failed" in str(errors[0])


def test_large_bodies_that_wait_are_limited_in_all(serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "_MOST_WAITING", 100_000)
    reading, free = threading.Event(), threading.Event()

    def read(self: Helper, function: Callable[[Any, bytes], Any], data: list[bytes]) -> Any:
        reading.set()
        assert free.wait(10)
        raise RequestError("read")

    monkeypatch.setattr(Helper, "call", read)
    url = serve(FakeEngine(), max_request_body=200_000)
    body = {"prompt": "x" * 60_000}
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(httpx.post, url + COMPLETIONS, json=body)
        assert reading.wait(10)
        assert "large bodies are waiting" in error_of(httpx.post(url + COMPLETIONS, json=body), 503)["message"]
        free.set()
        assert error_of(first.result())["message"] == "read"
    # One alone may be of any size that a body may have.
    assert error_of(httpx.post(url + COMPLETIONS, json={"prompt": "x" * 150_000}))["message"] == "read"


def _sleep(context: None, data: bytes) -> None:
    time.sleep(float(data))


def test_the_limit_of_a_body(serve: Callable[..., str]) -> None:
    url = serve(FakeEngine(), max_request_body=1000)
    body = {"prompt": "x" * 100, "max_tokens": 1}
    assert httpx.post(url + COMPLETIONS, json=body).status_code == 200
    for path in (COMPLETIONS, CHAT):
        error = error_of(httpx.post(url + path, json={"prompt": "x" * 1000}), 413)
        assert "longer than 1000 bytes (--max-request-body)" in error["message"]
