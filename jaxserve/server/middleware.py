"""What surrounds a request: its id, its line in the log, the end of work nobody waits for, an answer to errors."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Callable, Collection
from contextvars import ContextVar
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.logging import get_logger
from jaxserve.server.access import route_path
from jaxserve.server.errors import describe

__all__ = ["HTTP_ID", "AbortOnDisconnect", "AnswerErrors", "RequestId"]

_log = get_logger("jaxserve.server.access")

HTTP_ID: ContextVar[str] = ContextVar("HTTP_ID", default="")
"""The ``X-Request-Id`` of what is being served: every endpoint would have to hand it through, and none looks at it."""

_USABLE_ID = re.compile(r"[!-~]{1,128}")
_LONGEST_PATH = 256


class RequestId:
    """Gives every answer the header ``X-Request-Id``: the client's own value, or a new one; and logs a line of it.

    A line comes when an answer is complete, or its client has gone. Nothing is logged of paths in ``unlogged``, or of
    any if that is None.
    """

    def __init__(self, app: ASGIApp, unlogged: Collection[str] | None) -> None:
        self._app = app
        self._unlogged = unlogged

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _USABLE_ID.fullmatch(given) else uuid.uuid4().hex
        began = time.monotonic()
        status: int | str = "no answer"

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
                status = message["status"]
            await send(message)

        of_task = HTTP_ID.set(request_id)
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            HTTP_ID.reset(of_task)
            if self._unlogged is not None and route_path(scope) not in self._unlogged:
                # Quoted: a path holds what a client likes, line breaks too.
                path = quote(scope["path"][:_LONGEST_PATH])
                took = 1e3 * (time.monotonic() - began)
                _log.info("%s %s %s %.1f ms id=%s", scope["method"], path, status, took, request_id)


class AbortOnDisconnect:
    """Cancels the work on a request whose client has gone.

    Whatever the work waits for (the queue, the next token, a slow reader), the cancellation reaches the engine's
    generator, which aborts the request. ``note`` is told whether the answer had begun, but for paths in ``endless``:
    their answers have no other end.
    """

    def __init__(self, app: ASGIApp, note: Callable[[bool], None], endless: Collection[str] = ()) -> None:
        self._app = app
        self._note = note
        self._endless = endless

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        working = asyncio.current_task()
        assert working is not None
        # One message at a time: a body that nobody reads must not pile up here.
        inbox: asyncio.Queue[Message] = asyncio.Queue(maxsize=1)
        begun = answered = gone = False

        async def listen() -> None:
            nonlocal gone
            while (message := await receive())["type"] != "http.disconnect":
                await inbox.put(message)
            # The connection also counts as gone once the answer is out; the work ends by itself then.
            if not answered:
                gone = True
                if route_path(scope) not in self._endless:
                    self._note(begun)
                working.cancel()

        async def send_and_note(message: Message) -> None:
            nonlocal begun, answered
            begun = True
            answered |= message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        listening = asyncio.create_task(listen())
        try:
            await self._app(scope, inbox.get, send_and_note)
        except asyncio.CancelledError:
            if not gone or working.uncancel():  # somebody else wants this to end
                raise
        finally:
            listening.cancel()


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
