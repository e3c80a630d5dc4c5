"""Clients of the app over a fake engine: in process, and over a socket."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

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


@pytest.fixture
def start() -> Iterator[Callable[..., tuple[subprocess.Popen[str], str]]]:
    """Starts a server process with a pace and settings of the server; gives the process and where it listens."""
    processes: list[subprocess.Popen[str]] = []

    def start(pace: float, **settings: Any) -> tuple[subprocess.Popen[str], str]:
        engine, server = json.dumps({"seconds_per_token": pace}), json.dumps({"port": 0, **settings})
        command = [sys.executable, str(Path(__file__).with_name("serve_fake.py")), engine, server]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("jaxserve: serving fake-model on "), process.communicate()
        return process, line.split()[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()
