"""``GET /debug/live``: the engine's memory and time, as events, for as long as somebody looks.

Who looks at the same pace looks through one *channel*, which takes one snapshot per interval and has it drawn once,
however many they are. A channel is opened by its first viewer and closed by its last; with the last of all, the engine
stops noting anything.

Nobody waits for a viewer. One that is behind by a few states loses them, and starts anew with a whole map when it reads
on.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import deque
from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxserve.errors import EngineDeadError, QueueFullError, RequestError
from jaxserve.server.errors import describe
from jaxserve.server.live_events import Painter, Picture, as_event
from jaxserve.server.protocol import Engine
from jaxserve.server.sse import Event, EventStream

__all__ = ["LIVE_PATH", "Live", "routes"]

LIVE_PATH = "/debug/live"

_INTERVALS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Seconds between states. Few, so that those who ask for times of their own cannot have a snapshot each."""

_MAX_VIEWERS = 64
_MAX_BEHIND = 4


class Live:
    """All who look at an engine. Belongs to one event loop.

    Args:
        engine: the engine.
        model: the name under which it is served.
    """

    def __init__(self, engine: Engine, model: str) -> None:
        self._engine = engine
        self._model = model
        self._began = time.monotonic()
        self._channels: dict[float, _Channel] = {}
        self._is_closed = False

    @property
    def num_viewers(self) -> int:
        """How many look now."""
        return sum(len(channel.viewers) for channel in self._channels.values())

    async def events(self, interval: float) -> AsyncGenerator[Event, None]:
        """The events of one viewer, as lines, at least ``interval`` seconds apart.

        EngineDeadError: the engine has stopped, before or now. QueueFullError: too many look already.
        """
        self._engine.check_health()
        if self._is_closed:
            raise EngineDeadError("the server is shutting down.")
        if self.num_viewers >= _MAX_VIEWERS:
            raise QueueFullError(f"{_MAX_VIEWERS} look at {LIVE_PATH} already.", retry_after=1.0)
        interval = _INTERVALS[bisect_left(_INTERVALS, interval)]
        channel = self._channels.get(interval)
        if channel is None or channel.is_closed:  # by an error that one who does not read has not heard of yet
            painter = Painter(
                self._model,
                self._engine.max_model_len,
                self._engine.live.shape,
                began=self._began,
                interval=interval,
            )
            channel = self._channels[interval] = _Channel(self._engine, painter, interval)
        viewer = _Viewer(channel)
        channel.viewers.add(viewer)
        try:
            while (lines := await viewer.next()) is not None:
                yield {"lines": lines}
        finally:
            channel.viewers.remove(viewer)
            if not channel.viewers:
                channel.close()
                if self._channels.get(interval) is channel:
                    del self._channels[interval]

    def close(self) -> None:
        """End all streams; there are no new ones."""
        self._is_closed = True
        for channel in self._channels.values():
            channel.close()


class _Channel:
    """Those who look at one pace.

    Attributes:
        viewers: they.
        picture: the newest state, None before the first.
        error: why there are no more.
        is_closed: there are no more.
    """

    def __init__(self, engine: Engine, painter: Painter, interval: float) -> None:
        self.viewers: set[_Viewer] = set()
        self.picture: Picture | None = None
        self.error: Exception | None = None
        self.is_closed = False
        self._engine = engine
        self._painter = painter
        self._interval = interval
        self._starting: tuple[Picture, asyncio.Future[bytes]] | None = None
        self._task = asyncio.create_task(self._run())

    def close(self) -> None:
        """Stop."""
        self.is_closed = True
        self._task.cancel()
        for viewer in self.viewers:
            viewer.wake()

    async def start(self, picture: Picture) -> bytes:
        """What a newcomer is shown, made once for all who come between two states."""
        if self._starting is None or self._starting[0] is not picture:
            self._starting = picture, asyncio.ensure_future(asyncio.to_thread(picture.start))
        return await asyncio.shield(self._starting[1])

    async def _run(self) -> None:
        try:
            with self._engine.live.watched():
                while True:
                    began = asyncio.get_running_loop().time()
                    await self._show()
                    await asyncio.sleep(began + self._interval - asyncio.get_running_loop().time())
        except Exception as error:
            self.error = error
            self.close()

    async def _show(self) -> None:
        snapshot = await self._engine.live.snapshot()
        adapters = self._engine.adapters
        slots = (adapters.num_slots, adapters.infos() if adapters.num_slots else [])
        self.picture = await asyncio.to_thread(self._painter.draw, snapshot, slots)
        for viewer in self.viewers:
            viewer.offer(self.picture.lines)


class _Viewer:
    """One who looks: a few states that it has not read yet, or none if it needs a new start."""

    def __init__(self, channel: _Channel) -> None:
        self._channel = channel
        self._unread: deque[bytes] = deque()
        self._needs_start = True
        self._news = asyncio.Event()

    def offer(self, lines: bytes) -> None:
        """There is a new state."""
        if not self._needs_start:
            self._unread.append(lines)
            if len(self._unread) > _MAX_BEHIND:
                self._needs_start = True
                self._unread.clear()
        self._news.set()

    def wake(self) -> None:
        """There will be no more."""
        self._news.set()

    async def next(self) -> bytes | None:
        """The next lines, None at the end; raises what has ended it."""
        channel = self._channel
        while True:
            if channel.error is not None:
                raise channel.error
            if channel.is_closed:
                return None
            if self._needs_start and channel.picture is not None:
                self._needs_start = False
                return await channel.start(channel.picture)
            if self._unread:
                return self._unread.popleft()
            self._news.clear()
            await self._news.wait()


class _LiveStream(EventStream):
    """Events that are lines already; an error is the event ``error``, and the last."""

    farewell = b""

    def encode(self, event: Event) -> bytes:
        lines: bytes = event["lines"]
        return lines

    def explain(self, error: Exception) -> Event:
        return {"lines": as_event("error", describe(error).body())}


def routes(live: Live) -> list[Route]:
    """Routes of this family."""

    async def look(request: Request) -> Response:
        stream = _LiveStream(live.events(_interval(request.query_params.get("interval", "250"))))
        if request.method == "GET":
            return stream
        # The server sends nothing of what HEAD is answered with, and waits for its end, which would never come.
        head = Response(headers=stream.headers)
        del head.headers["content-length"]
        return head

    return [Route(LIVE_PATH, look)]


def _interval(text: str) -> float:
    """Seconds. RequestError: it is no number of milliseconds from 100 to 10000."""
    if not (text.isascii() and text.isdecimal() and len(text) <= 5 and 100 <= int(text) <= 10_000):
        raise RequestError(f"interval must be from 100 to 10000 (milliseconds), got {text[:40]!r}.", "interval")
    return int(text) / 1e3
