"""Large bodies: read in another process, the same answers, and the event loop free meanwhile."""

from __future__ import annotations

import json
import operator
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
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


LONG = "wörld " * 6000
TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": LONG}, {"role": "user", "content": "go"}]
TOOL = {"name": "f", "input_schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": TURNS, "system": "brief", "max_tokens": 5, "tools": [TOOL], "x": 1}),
        ("/v1/messages", {"messages": TURNS, "max_tokens": 5, "stream": True}),
        ("/v1/messages/count_tokens", {"messages": TURNS * 3}),  # more than the context holds
        ("/v1/responses", {"input": TURNS, "instructions": "brief", "max_output_tokens": 5, "store": False}),
        ("/v1/responses", {"input": TURNS, "max_output_tokens": 5, "stream": True}),
        ("/v1/embeddings", {"input": [LONG, "b"], "dimensions": 3}),
        ("/v1/embeddings", {"input": [7] * 50_000, "truncate_prompt_tokens": 20}),
        ("/v1/score", {"queries": LONG, "documents": ["a", "b"]}),
        ("/v1/rerank", {"query": "q", "documents": [LONG, {"text": "b"}], "top_n": 1, "x": 1}),
        ("/tokenize", {"prompt": LONG, "return_token_strs": True}),
        ("/tokenize", {"messages": TURNS, "return_token_strs": True, "x": 1}),
        ("/detokenize", {"tokens": [7] * 50_000}),
        # Refused alike.
        ("/v1/messages", {"messages": TURNS * 3, "max_tokens": 5}),
        ("/v1/messages", {"messages": TURNS, "max_tokens": 5, "stop_sequences": [""]}),
        ("/v1/responses", {"input": TURNS * 3}),
        ("/v1/responses", {"input": TURNS, "text": {"format": {"type": "x"}}}),
        ("/v1/embeddings", {"input": [[7] * 70_000, [1]]}),
        ("/v1/score", {"text_1": [LONG] * 2, "text_2": ["x"] * 3}),
        ("/v1/rerank", {"query": "", "documents": [LONG]}),
        ("/detokenize", {"tokens": [7] * 50_000 + [1000]}),
        ("/v1/messages", {"messages": TURNS, "max_tokens": 5, "model": "fake-modle"}),
    ],
)
def test_every_endpoint_answers_large_bodies_like_small_ones(
    client: httpx.Client, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    calls: list[Any] = []
    call = Helper.call

    def counted(self: Helper, function: Callable[[Any, bytes], Any], data: Sequence[bytes]) -> Any:
        calls.append(function)
        return call(self, function, data)

    monkeypatch.setattr(Helper, "call", counted)
    apart = client.post(path, json=body)
    assert calls
    monkeypatch.setattr(intake, "LARGE", 10**9)
    prompts = [list(one["ids"]) for one in engine.submitted]
    calls.clear()
    at_once = client.post(path, json=body)
    assert not calls
    assert (apart.status_code, ids_aside(apart.text)) == (at_once.status_code, ids_aside(at_once.text))
    assert apart.headers.get("x-jaxserve-ignored") == at_once.headers.get("x-jaxserve-ignored")
    if at_once.status_code == 200:
        told = [list(one["ids"]) for one in engine.submitted[len(prompts) :]]
        assert prompts[len(prompts) - len(told) :] == told


def ids_aside(text: str) -> str:
    text = re.sub(r'"(msg|resp|fc|rs|item|embd|score|rerank)[_-][0-9a-f]{32}"', '"id"', text)
    return re.sub(r'"(created|created_at|completed_at)":[0-9]+', "", text)


def test_a_long_conversation_of_responses_is_put_together_elsewhere(client: httpx.Client, engine: FakeEngine) -> None:
    said = [{"role": "user", "content": f"message {i} wörld"} for i in range(1000)]
    first = client.post("/v1/responses", json={"input": said, "max_output_tokens": 5}).json()
    asked = {"input": "And?", "previous_response_id": first["id"], "max_output_tokens": 5}
    second = client.post("/v1/responses", json=asked).json()
    assert second["status"] == "incomplete"
    before = [{"role": message["role"], "content": message["content"]} for message in said]
    conversation = [*before, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "And?"}]
    assert list(engine.submitted[-1]["ids"]) == FakeTokenizer().apply_chat_template(conversation)
    items = f"/v1/responses/{first['id']}/input_items"
    page = client.get(items, params={"limit": 2, "order": "asc"}).json()
    assert [item["content"][0]["text"] for item in page["data"]] == ["message 0 wörld", "message 1 wörld"]
    after = client.get(items, params={"limit": 1, "order": "asc", "after": page["last_id"]}).json()
    assert after["data"][0]["content"][0]["text"] == "message 2 wörld"
    assert error_of(client.get(items, params={"after": "nothing"}))["param"] == "after"


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/v1/messages", {"messages": TURNS * 3, "max_tokens": 5}, None, "input tokens"),
        ("/v1/messages", {"messages": TURNS, "max_tokens": 5, "cache_control": "y" * 2**21}, None, "beside the prompt"),
        ("/v1/responses", {"input": TURNS * 3}, "input", "input tokens"),
        ("/v1/responses", {"input": "x", "instructions": "y" * 2**21}, None, "beside the prompt take"),
        ("/v1/embeddings", {"input": [[7] * 70_000, [1]]}, "input", "contains 70000 input tokens"),
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
        response = client.post(path, json={**body, "stream": stream})
        if path == "/v1/messages":  # in a shape of its own
            assert response.status_code == 400
            assert message in response.json()["error"]["message"]
            continue
        error = error_of(response, 404 if param == "model" else 400)
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
