"""Anthropic's messages, for clients that speak no other language."""

from __future__ import annotations

from jaxserve.server.anthropic.dialect import Dialect
from jaxserve.server.anthropic.routes import routes

__all__ = ["Dialect", "routes"]
