"""Over real sockets: the openai client, clients that go away, streams that wait."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from tests.server.fake import SCRIPT, FakeEngine

Serve = Callable[..., str]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline, "it did not happen within 5 s"
        time.sleep(0.01)


def test_openai_client(serve: Serve) -> None:
    url = serve(FakeEngine())
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        model = client.models.list().data[0].id
        completion = client.completions.create(model=model, prompt="x", max_tokens=11, logprobs=1)
        assert completion.choices[0].text == "Hello wörl"
        assert completion.usage is not None
        assert completion.usage.completion_tokens == 11
        chunks = list(client.completions.create(model=model, prompt="x", max_tokens=11, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello wörl"
        chat = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "x"}], max_completion_tokens=5, logprobs=True, seed=1
        )
        assert chat.choices[0].message.content == "Hello"
        with client.chat.completions.stream(
            model=model,
            messages=[{"role": "developer", "content": "rule"}, {"role": "user", "content": "x"}],
            stream_options={"include_usage": True},
            stop="time",
            n=2,
        ) as stream:
            final = stream.get_final_completion()
        assert final.choices[0].message.content == SCRIPT[: SCRIPT.index("time")]
        assert final.choices[0].finish_reason == "stop"
        assert final.usage is not None
        assert final.usage.prompt_tokens_details is not None
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model=model, prompt="x", temperature=-1)
        assert caught.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="x")


def test_dropped_streams_are_aborted(serve: Serve) -> None:
    engine = FakeEngine(seconds_per_token=0.005)
    url = serve(engine)

    def drop(_: int) -> None:
        body = {"prompt": "x", "ignore_eos": True, "max_tokens": 500, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
            next(response.iter_lines())

    with ThreadPoolExecutor(20) as pool:
        list(pool.map(drop, range(20)))
    wait_until(lambda: not engine.running)
    assert engine.aborted == 20
    assert 'engine="0",finished_reason="abort",model_name="fake-model"} 20.0' in httpx.get(f"{url}/metrics").text


def test_dropped_plain_request_is_aborted(serve: Serve) -> None:
    engine = FakeEngine(seconds_per_token=0.05)
    url = serve(engine)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 500}, timeout=0.3)
    wait_until(lambda: engine.aborted == 1)
    assert not engine.running


def gone(url: str, stage: str) -> float:
    head = f'jaxserve:client_disconnects_total{{engine="0",model_name="fake-model",stage="{stage}"}} '
    text = httpx.get(f"{url}/metrics").text
    return float(next(line for line in text.splitlines() if line.startswith(head)).removeprefix(head))


def test_clients_that_left_are_counted(serve: Serve) -> None:
    engine = FakeEngine(seconds_per_token=0.02)
    url = serve(engine)
    body = {"prompt": "x", "max_tokens": 500}
    httpx.post(f"{url}/v1/completions", json={**body, "max_tokens": 2})
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/completions", json=body, timeout=0.2)
    with httpx.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}) as response:
        next(response.iter_lines())
    wait_until(lambda: (gone(url, "waiting"), gone(url, "streaming")) == (1, 1))


def test_bodies_that_never_come(serve: Serve) -> None:
    url = serve(FakeEngine())
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as half:
        half.sendall(head.encode() + b'{"prompt": ')
    wait_until(lambda: gone(url, "waiting") == 1)
    with httpx.Client(base_url=url, headers={"content-type": "application/json"}) as client:
        for _ in range(2):
            assert client.post("/v1/completions").status_code == 400
            assert client.post("/pause").status_code == client.post("/resume", content=b"{}").status_code == 200
    assert gone(url, "waiting") == 1


@pytest.mark.parametrize("stream", [False, True])
def test_dropped_queued_request_is_aborted(serve: Serve, stream: bool) -> None:
    engine = FakeEngine(max_running=0)
    url = serve(engine)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/completions", json={"prompt": ["x", "y"], "stream": stream}, timeout=0.3)
    wait_until(lambda: engine.aborted == 2)
    assert not engine.waiting


def test_normal_ends_make_no_abort(serve: Serve) -> None:
    engine = FakeEngine()
    url = serve(engine)
    with httpx.Client(base_url=url) as client:
        for index in range(30):
            body = {"prompt": "x", "stream": bool(index % 2)}
            assert client.post("/v1/completions", json=body).status_code == 200
        assert (engine.finished, engine.aborted) == (30, 0)
        assert 'engine="0",finished_reason="abort",model_name="fake-model"} 0.0' in client.get("/metrics").text


def test_waiting_stream_is_kept_alive(serve: Serve) -> None:
    url = serve(FakeEngine(seconds_per_token=0.25), sse_keep_alive_interval=0.1)
    body = {"prompt": "x", "max_tokens": 2, "stream": True}
    event, blank = ['data: {"id":', ""], ["", ""]  # the line that ends an event, and those between events
    end = ["data: [DONE]", "", ""]
    text = httpx.post(f"{url}/v1/completions", json=body).text
    assert [line[:12] for line in text.split("\n")] == [*(2 * blank + event) * 2, *end]
    url = serve(FakeEngine(seconds_per_token=0.25), sse_keep_alive_interval=0.0)
    text = httpx.post(f"{url}/v1/completions", json=body).text
    assert [line[:12] for line in text.split("\n")] == [*event * 2, *end]


def test_a_stream_that_fails_before_its_first_event_has_a_status(serve: Serve) -> None:
    url = serve(FakeEngine(fails_at=0), sse_keep_alive_interval=5)
    response = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "stream": True})
    assert (response.status_code, response.headers["content-type"]) == (500, "application/json")
    url = serve(FakeEngine(fails_at=0, seconds_per_token=0.2), sse_keep_alive_interval=0.05)
    late = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "stream": True})
    assert late.status_code == 200
    assert '"code":500' in late.text
