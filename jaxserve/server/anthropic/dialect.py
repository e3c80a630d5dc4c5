"""How Anthropic's clients are told of errors."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.server.access import route_path
from jaxserve.server.jsonio import dumps

__all__ = ["Dialect", "error_body"]

_PATH = "/v1/messages"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(status: int, message: str) -> dict[str, Any]:
    """An error in Anthropic's shape."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


class Dialect:
    """Translates errors of the messages' paths, whoever answers with them; leaves all others alone."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = route_path(scope) if scope["type"] == "http" else ""
        if path != _PATH and not path.startswith(_PATH + "/"):
            await self._app(scope, receive, send)
            return
        held: list[Message] = []

        async def translate(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] < 400 and not held:
                await send(message)
            elif held or message["type"] == "http.response.start":
                held.append(message)
                if message["type"] == "http.response.body" and not message.get("more_body", False):
                    await _send_error(held[0], (part["body"] for part in held[1:]), send)
            else:
                await send(message)

        await self._app(scope, receive, translate)


async def _send_error(start: Message, parts: Iterable[bytes], send: Send) -> None:
    body = dumps(error_body(start["status"], _message(b"".join(parts))))
    headers = MutableHeaders(scope=start)
    headers["content-length"] = str(len(body))
    headers["content-type"] = "application/json"
    await send(start)
    await send({"type": "http.response.body", "body": body})


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, TypeError, KeyError):  # not one of ours
        return body.decode("utf-8", "replace")
