"""Clients of the app over a fake engine: in process, and over a socket."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest
import uvicorn

from jaxserve.config import ServerConfig
from jaxserve.server import bind, create_app
from tests.server.fake import FakeEngine


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the app itself; exceptions that the app lets through fail the test."""
    transport = httpx.ASGITransport(create_app(engine, ServerConfig()))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


@contextmanager
def _serve(engine: FakeEngine, config: ServerConfig) -> Iterator[str]:
    with bind(config) as sock:
        server = uvicorn.Server(uvicorn.Config(create_app(engine, config), log_config=None, lifespan="off", ws="none"))
        thread = threading.Thread(target=server.run, args=([sock],))
        thread.start()
        deadline = time.monotonic() + 10
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.005)
        try:
            yield "http://{}:{}".format(*sock.getsockname())
        finally:
            server.should_exit = True
            thread.join(10)
            assert not thread.is_alive()


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Serves an engine, with settings of the server, on a port of its own until the test ends; gives the URL."""
    with ExitStack() as stack:

        def start(engine: FakeEngine, **settings: Any) -> str:
            return stack.enter_context(_serve(engine, ServerConfig(port=0, **settings)))

        yield start
