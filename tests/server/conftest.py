"""Clients of the app over a fake engine: in process, and over a socket."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack

import httpx
import pytest

from jaxserve.config import ServerConfig
from jaxserve.server import create_app
from tests.server.fake import FakeEngine
from tests.server.serving import served


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


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Serves an engine on a port of its own until the test ends, with settings of the server; gives the URL."""
    with ExitStack() as stack:
        yield lambda engine, **settings: stack.enter_context(served(engine, ServerConfig(port=0, **settings)))
