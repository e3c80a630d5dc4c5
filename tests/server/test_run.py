"""The whole life of a server process."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Coroutine
from typing import ClassVar

import httpx
import pytest
import uvicorn

from jaxserve.config import ServerConfig
from jaxserve.errors import ConfigError, JaxserveError
from jaxserve.server import bind, create_app
from jaxserve.server.run import _Server
from tests.server.fake import FakeEngine

Start = Callable[..., tuple[subprocess.Popen[str], str]]


def stream_in_background(url: str, num_tokens: int) -> tuple[threading.Thread, list[str]]:
    lines: list[str] = []

    def read() -> None:
        body = {"prompt": "x", "max_tokens": num_tokens, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as response:
            lines.extend(line for line in response.iter_lines() if line)

    thread = threading.Thread(target=read)
    thread.start()
    deadline = time.monotonic() + 10
    while 'num_requests_running{engine="0",model_name="fake-model"} 1.0' not in httpx.get(f"{url}/metrics").text:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return thread, lines


def test_first_signal_lets_running_requests_end(start: Start) -> None:
    process, url = start(0.02, shutdown_timeout=30)
    reader, lines = stream_in_background(url, 40)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")
    reader.join(10)
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    out, err = process.communicate(timeout=10)
    assert process.returncode == 0
    assert (out, err) == ("shutdowns [0.0] running 0 finished 1\n", "")


@pytest.mark.parametrize(("drain", "signals"), [(0.3, [signal.SIGTERM]), (60, [signal.SIGINT, signal.SIGTERM])])
def test_drain_ends_with_its_time_or_a_second_signal(start: Start, drain: float, signals: list[signal.Signals]) -> None:
    process, url = start(0.02, shutdown_timeout=drain)
    reader, lines = stream_in_background(url, 500)
    began = time.monotonic()
    for number in signals:
        process.send_signal(number)
        time.sleep(0.15)
    reader.join(10)
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == 503
    out, _ = process.communicate(timeout=10)
    assert process.returncode == 0
    assert out == "shutdowns [0.0] running 0 finished 0\n"
    assert time.monotonic() - began < 5


def run_and_stop(stop: Callable[[_Server, socket.socket], Coroutine[None, None, None]]) -> None:
    """Give ``stop`` a server that has a minute to drain; the engine must be shut down once."""
    config, engine = ServerConfig(port=0, shutdown_timeout=60), FakeEngine()
    with bind(config) as sock:
        settings = uvicorn.Config(create_app(engine, config), log_config=None, lifespan="off", ws="none")
        settings.load()
        server = _Server(settings, engine, config, None, lambda: None)
        server.lifespan = settings.lifespan_class(settings)
        asyncio.run(stop(server, sock))
    assert engine.shutdowns == [0.0]


def test_a_connection_that_comes_while_the_server_stops_is_not_waited_for() -> None:
    class Late:
        scope = None

        def __init__(self, server: _Server) -> None:
            self._server = server

        def shutdown(self) -> None:
            self._server.server_state.connections.discard(self)

    async def stop(server: _Server, sock: socket.socket) -> None:
        await server.startup([sock])
        stopping = asyncio.create_task(server.shutdown([sock]))
        await asyncio.sleep(0.05)  # uvicorn has told all connections that it knows
        server.server_state.connections.add(Late(server))  # type: ignore[arg-type]
        await asyncio.wait_for(stopping, 5)

    run_and_stop(stop)


def test_a_live_stream_that_nobody_reads_is_not_waited_for() -> None:
    class Unread:
        scope: ClassVar[dict[str, str]] = {"type": "http", "path": "/debug/live"}

        def __init__(self, server: _Server) -> None:
            self._server = server
            self.transport = self

        def shutdown(self) -> None:
            """Its answer has not ended."""

        def abort(self) -> None:
            self._server.server_state.connections.discard(self)  # type: ignore[arg-type]

    async def stop(server: _Server, sock: socket.socket) -> None:
        await server.startup([sock])
        server.server_state.connections.add(Unread(server))  # type: ignore[arg-type]
        await asyncio.wait_for(server.shutdown([sock]), 10)

    run_and_stop(stop)


def test_idle_server_stops_at_once(start: Start) -> None:
    process, url = start(0.0)
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=5)
    assert process.returncode == 0


def test_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(JaxserveError, match="in use"):
        bind(ServerConfig(port=other.getsockname()[1]))


def test_unknown_host() -> None:
    with pytest.raises(ConfigError, match="cannot be resolved"):
        bind(ServerConfig(host="no.such.host.invalid"))
