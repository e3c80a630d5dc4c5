"""OpenAI's responses: chats whose answers are lists of items, kept so that later requests can go on from them."""

from __future__ import annotations

from jaxserve.server.responses.routes import routes

__all__ = ["routes"]
