"""The OpenAI-compatible HTTP server over one engine."""

from __future__ import annotations

from jaxserve.server.app import create_app
from jaxserve.server.listening import bind
from jaxserve.server.protocol import Engine
from jaxserve.server.run import run_server

__all__ = ["Engine", "bind", "create_app", "run_server"]
