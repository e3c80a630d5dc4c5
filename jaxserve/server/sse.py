"""Server-sent events: one JSON object per event, ``[DONE]`` at the end.

The status line is held back until the first event is there, so that a request which is refused gets its proper status;
only when that takes long does the stream open before, with comments that keep proxies from closing it. An error after
that is an event of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from jaxserve.server.errors import describe
from jaxserve.server.jsonio import dumps

__all__ = ["Event", "EventStream", "NamedEventStream"]

Event = dict[str, Any]


class EventStream(Response):
    """A response made of the events of a generator, which is closed however the response ends.

    The app's ``state.keep_alive_seconds`` says how long it may be silent; 0 is for ever.
    """

    media_type = "text/event-stream"
    farewell = b"data: [DONE]\n\n"

    def __init__(
        self,
        events: AsyncGenerator[Event, None],
        headers: Mapping[str, str] | None = None,
        late_headers: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """``late_headers`` is asked for more when the first event is there."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})
        # A stream's length is not known beforehand.
        del self.headers["content-length"]
        self._events = events
        self._late_headers = late_headers

    def _start(self) -> Message:
        self.headers.update(self._late_headers())
        return {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}

    def encode(self, event: Event) -> bytes:
        """The lines of an event."""
        return b"data: " + dumps(event)

    def explain(self, error: Exception) -> Event:
        """The event that tells of an error."""
        return describe(error).body()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        line = _Line(self._start, send)
        silence = scope["app"].state.keep_alive_seconds
        ticking = asyncio.create_task(line.keep_alive(silence)) if silence else None
        try:
            async with aclosing(self._events) as events:
                try:
                    async for event in events:
                        await line.write(self.encode(event) + b"\n\n")
                except Exception as error:
                    if not line.begun:
                        raise
                    await line.write(self.encode(self.explain(error)) + b"\n\n")
            await line.write(self.farewell, more=False)
        finally:
            if ticking is not None:
                ticking.cancel()
                await asyncio.gather(ticking, return_exceptions=True)


class NamedEventStream(EventStream):
    """Events whose type is told in a line of its own as well, and which end without a mark."""

    farewell = b""

    def encode(self, event: Event) -> bytes:
        return b"event: " + str(event["type"]).encode("ascii") + b"\n" + super().encode(event)


class _Line:
    """What is written to, by the stream and by what keeps it alive, one at a time."""

    def __init__(self, start: Callable[[], Message], send: Send) -> None:
        self.begun = False
        self._start = start
        self._send = send
        self._turn = asyncio.Lock()
        self._written_at = asyncio.get_running_loop().time()

    async def write(self, lines: bytes, *, more: bool = True) -> None:
        """Send one event or comment with its empty line, after the head if it is the first."""
        async with self._turn:
            if not self.begun:
                self.begun = True
                await self._send(self._start())
            await self._send({"type": "http.response.body", "body": lines, "more_body": more})
            self._written_at = asyncio.get_running_loop().time()

    async def keep_alive(self, silence: float) -> None:
        """Write a comment whenever nothing was written for so many seconds."""
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(max(0.0, self._written_at + silence - clock()))
            if clock() >= self._written_at + silence:
                await self.write(b": keep-alive\n\n")
