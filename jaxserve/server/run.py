"""Runs the server in this process, from its socket to the last answer.

A first SIGTERM or SIGINT stops accepting and lets running requests end, up to ``shutdown_timeout``; what is left then,
or at a second signal, is aborted, and its clients are told. Either way the process ends with code 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from types import FrameType

import uvicorn

from jaxserve.config import ServerConfig
from jaxserve.errors import ConfigError, JaxserveError
from jaxserve.server.app import create_app
from jaxserve.server.protocol import Engine

__all__ = ["bind", "run_server"]

_TICK_SECONDS = 0.1
_LAST_WORDS_SECONDS = 2.0


def bind(config: ServerConfig) -> socket.socket:
    """A socket bound to the configured address; nothing is accepted yet.

    ConfigError: the address cannot be used on this machine. JaxserveError: it is in use, or not permitted.
    """
    where = f"{config.host}:{config.port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"host {config.host!r} cannot be resolved: {error.strerror or error}.", "host") from None
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise JaxserveError(f"cannot listen on {where}: {error.strerror or error}.") from None
    return sock


def run_server(engine: Engine, config: ServerConfig, sock: socket.socket | None = None) -> None:
    """Serve until a signal comes, then shut the engine down.

    Args:
        engine: a started engine; stopped when this returns.
        config: how to serve.
        sock: from ``bind``; None binds here, with its errors.
    """
    sock = sock or bind(config)
    settings = uvicorn.Config(
        create_app(engine, config), log_config=None, log_level="warning", access_log=False, lifespan="off", ws="none"
    )
    _Server(settings, engine, config.shutdown_timeout).run(sockets=[sock])


class _Server(uvicorn.Server):
    def __init__(self, settings: uvicorn.Config, engine: Engine, drain_seconds: float) -> None:
        super().__init__(settings)
        self._engine = engine
        self._drain_seconds = drain_seconds
        self._hurry = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for sock in sockets or ():
            host, port = sock.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            print(f"jaxserve: serving {self._engine.model_name} on http://{shown}:{port}", flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Uvicorn's own handler would raise the signal again at the end, and the process would die of it.
        self._hurry = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        closing = asyncio.create_task(super().shutdown(sockets))
        deadline = asyncio.get_running_loop().time() + self._drain_seconds
        while not (closing.done() or self._hurry or asyncio.get_running_loop().time() >= deadline):
            await asyncio.wait({closing}, timeout=_TICK_SECONDS)
        await self._engine.shutdown(0.0)
        # Aborted requests still get their last event; a client that does not read is not waited for.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(closing, _LAST_WORDS_SECONDS)
