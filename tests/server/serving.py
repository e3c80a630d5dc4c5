"""An app on a socket, in a thread of its own."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette

from jaxserve.config import ServerConfig
from jaxserve.server import Engine, bind, create_app


@contextmanager
def served(engine: Engine, config: ServerConfig) -> Iterator[str]:
    """Serve until the context ends; gives the URL."""
    with bind(config) as sock:
        app = create_app(engine, config)
        try:
            with running(app, sock, config.root_path or "") as url:
                yield url
        finally:
            app.state.intake.close()


@contextmanager
def running(app: Starlette, sock: socket.socket, root_path: str = "") -> Iterator[str]:
    """Run any app until the context ends; gives the URL."""
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", ws="none", root_path=root_path))
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
