"""Server-sent events: one JSON object per event, ``[DONE]`` at the end.

The status line is held back until the first event is there, so that a request which is refused gets its proper status;
only when that takes long does the stream open before, with comments that keep proxies from closing it. An error after
that is an event of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Self

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxserve.server.errors import describe
from jaxserve.server.jsonio import dumps

__all__ = ["KEEP_ALIVE_SECONDS", "EventStream", "NamedEventStream"]

KEEP_ALIVE_SECONDS = 15.0

Event = dict[str, Any]


class EventStream(Response):
    """A response made of the events of a generator, which is closed however the response ends."""

    media_type = "text/event-stream"
    farewell = b"data: [DONE]\n\n"

    def __init__(
        self,
        events: AsyncGenerator[Event, None],
        keep_alive_seconds: float = KEEP_ALIVE_SECONDS,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})
        # A stream's length is not known beforehand.
        del self.headers["content-length"]
        self._events = events
        self._keep_alive_seconds = keep_alive_seconds
        self._pending: asyncio.Task[Event | None] = asyncio.create_task(self._advance())

    @classmethod
    async def open(
        cls,
        events: AsyncGenerator[Event, None],
        keep_alive_seconds: float = KEEP_ALIVE_SECONDS,
        headers: Mapping[str, str] | None = None,
    ) -> Self:
        """Wait for the first event, but not for ever; an error before it is raised here."""
        stream = cls(events, keep_alive_seconds, headers)
        try:
            await asyncio.wait({stream._pending}, timeout=keep_alive_seconds)
            if stream._pending.done():
                stream._pending.result()
        except BaseException:
            await stream._close()
            raise
        return stream

    def encode(self, event: Event) -> bytes:
        """The lines of an event."""
        return b"data: " + dumps(event)

    def explain(self, error: Exception) -> Event:
        """The event that tells of an error."""
        return describe(error).body()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            while event := await self._next(send):
                await _write(send, self.encode(event))
            await send({"type": "http.response.body", "body": self.farewell})
        finally:
            await self._close()

    async def _next(self, send: Send) -> Event | None:
        """The next event, None at the end; sends comments while it waits."""
        while not (await asyncio.wait({self._pending}, timeout=self._keep_alive_seconds))[0]:
            await _write(send, b": keep-alive")
        try:
            event = self._pending.result()
        except Exception as error:
            event = self.explain(error)
        # The generator is finished after an error, so that its next step is the end.
        self._pending = asyncio.create_task(self._advance())
        return event

    async def _advance(self) -> Event | None:
        return await anext(self._events, None)

    async def _close(self) -> None:
        self._pending.cancel()
        await asyncio.gather(self._pending, return_exceptions=True)
        await self._events.aclose()


class NamedEventStream(EventStream):
    """Events whose type is told in a line of its own as well, and which end without a mark."""

    farewell = b""

    def encode(self, event: Event) -> bytes:
        return b"event: " + str(event["type"]).encode("ascii") + b"\n" + super().encode(event)


async def _write(send: Send, lines: bytes) -> None:
    await send({"type": "http.response.body", "body": lines + b"\n\n", "more_body": True})
