"""What surrounds every request: its id, the key check, the end of work nobody waits for, an answer to every error."""

from __future__ import annotations

import asyncio
import hmac
import re
import time
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.logging import get_logger
from jaxserve.server.errors import ErrorAnswer, describe

__all__ = ["AbortOnDisconnect", "AnswerErrors", "ApiKey", "RequestId"]

_log = get_logger(__name__)

_OPEN_PATHS = frozenset({"/health"})
_USABLE_ID = re.compile(r"[!-~]{1,128}")


class RequestId:
    """Gives every answer the header ``X-Request-Id``: the client's own value, or a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _USABLE_ID.fullmatch(given) else uuid.uuid4().hex
        began = time.monotonic()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
                waited = 1e3 * (time.monotonic() - began)
                line = "%s %s -> %d after %.1f ms, request id %s"
                _log.debug(line, scope["method"], scope["path"], message["status"], waited, request_id)
            await send(message)

        await self._app(scope, receive, send_with_id)


class ApiKey:
    """Lets only clients in that send one of the keys; without keys, everybody."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._keys or scope["path"] in _OPEN_PATHS or self._valid(scope):
            await self._app(scope, receive, send)
            return
        refusal = ErrorAnswer(
            401,
            "AuthenticationError",
            "a valid API key is needed: send the header 'Authorization: Bearer KEY'.",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await refusal.response()(scope, receive, send)

    def _valid(self, scope: Scope) -> bool:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        given = key.strip().encode("latin-1")
        # Every key is compared, each in constant time: the answer's delay tells nothing.
        matches = [hmac.compare_digest(given, known) for known in self._keys]
        return scheme.lower() == "bearer" and any(matches)


class AbortOnDisconnect:
    """Cancels the work on a request whose client has gone.

    Whatever the work waits for (the queue, the next token, a slow reader), the cancellation reaches the engine's
    generator, which aborts the request.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # One message at a time: a body that nobody reads must not pile up here.
        inbox: asyncio.Queue[Message] = asyncio.Queue(maxsize=1)
        answered = False

        async def forward_until_gone() -> None:
            while (message := await receive())["type"] != "http.disconnect":
                await inbox.put(message)

        async def send_and_note(message: Message) -> None:
            nonlocal answered
            answered |= message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        async def serve() -> None:
            await self._app(scope, inbox.get, send_and_note)

        serving = asyncio.create_task(serve())
        listening = asyncio.create_task(forward_until_gone())
        try:
            await asyncio.wait({serving, listening}, return_when=asyncio.FIRST_COMPLETED)
            if answered:
                # The connection also counts as gone once the answer is out; the work ends by itself then.
                await asyncio.wait({serving})
        finally:
            serving.cancel()
            listening.cancel()
            await asyncio.wait({serving, listening})
        if not serving.cancelled():
            serving.result()


class AnswerErrors:
    """Answers what nobody foresaw in the usual shape too; once the answer has begun it can only be cut off."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def send_and_note(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except Exception as error:
            if begun or scope["type"] != "http":
                raise
            await describe(error).response()(scope, receive, send)
