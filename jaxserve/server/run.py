"""Runs the server in this process, from its socket to the last answer.

A first SIGTERM or SIGINT stops accepting and lets running requests end, up to ``shutdown_timeout``; what is left then,
or at a second signal, is aborted, and its clients are told. Either way the process ends with code 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import ssl
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from jaxserve.config import ServerConfig
from jaxserve.logging import get_logger
from jaxserve.server.access import route_path
from jaxserve.server.app import create_app
from jaxserve.server.listening import Certificate, address_of, bind
from jaxserve.server.live import LIVE_PATH
from jaxserve.server.protocol import Engine

__all__ = ["run_server"]

_log = get_logger(__name__)

_TICK_SECONDS = 0.1
_SWITCH_SECONDS = 0.001
_KEEP_ALIVE_SECONDS = 75  # longer than clients keep a connection: who closes it first makes the other's request fail
_LAST_WORDS_SECONDS = 2.0


def run_server(engine: Engine, config: ServerConfig, sock: socket.socket | None = None) -> None:
    """Serve until a signal comes, then shut the engine down.

    Args:
        engine: a started engine; stopped when this returns.
        config: how to serve.
        sock: from ``bind``; None binds here, with its errors.
    """
    certificate = None if config.ssl_certfile is None else Certificate(config)
    app = create_app(engine, config)
    sock = sock or bind(config)
    settings = uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        root_path=config.root_path or "",
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
    )
    settings.load()
    settings.ssl = None if certificate is None else certificate.context
    # What lives as long as the process is not worth looking at whenever garbage is collected: with a model loaded, that
    # takes a good part of a second, in which no token is sent.
    gc.collect()
    gc.freeze()
    # Threads that render chats and make requests give way to the event loop after a millisecond instead of five.
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        _Server(settings, engine, config, certificate, app.state.live.close).run(sockets=[sock])
    finally:
        app.state.intake.close()
        if app.state.tracer is not None:
            app.state.tracer.close()
        if config.uds is not None:
            with contextlib.suppress(OSError):
                os.unlink(config.uds)


class _Server(uvicorn.Server):
    def __init__(
        self,
        settings: uvicorn.Config,
        engine: Engine,
        config: ServerConfig,
        certificate: Certificate | None,
        end_endless: Callable[[], None],
    ) -> None:
        """``end_endless`` ends the streams that would go on for ever."""
        super().__init__(settings)
        self._engine = engine
        self._end_endless = end_endless
        self._drain_seconds = config.shutdown_timeout
        self._certificate = certificate if config.enable_ssl_refresh else None
        self._scheme = "http" if certificate is None else "https"
        self._hurry = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for sock in sockets or ():
            where = address_of(sock, self._scheme)
            print(f"jaxserve: serving {self._engine.model_name} on {where}", flush=True)

    async def on_tick(self, counter: int) -> bool:
        if self._certificate is not None and counter % 10 == 0:
            try:
                if self._certificate.refresh():
                    _log.info("the certificate was loaded anew")
            except (OSError, ssl.SSLError) as error:  # half written: the old one serves on
                _log.warning("the new certificate cannot be loaded: %s", error)
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Uvicorn's own handler would raise the signal again at the end, and the process would die of it.
        self._hurry = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._end_endless()
        closing = asyncio.create_task(super().shutdown(sockets))
        began = asyncio.get_running_loop().time()
        deadline, patient_until = began + self._drain_seconds, began + _LAST_WORDS_SECONDS
        while not (closing.done() or self._hurry or asyncio.get_running_loop().time() >= deadline):
            await asyncio.wait({closing}, timeout=_TICK_SECONDS)
            # One that was accepted just before may be known only now, and uvicorn would wait for it until it is used.
            for connection in list(self.server_state.connections):
                connection.shutdown()
                # The end of an endless stream lies behind all that its client has not read.
                if asyncio.get_running_loop().time() >= patient_until and _is_endless(connection):
                    connection.transport.abort()
        await self._engine.shutdown(0.0)
        # Aborted requests still get their last event; a client that does not read is not waited for.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(closing, _LAST_WORDS_SECONDS)


def _is_endless(connection: Any) -> bool:
    scope = connection.scope  # None before the first request
    return scope is not None and route_path(scope) == LIVE_PATH
