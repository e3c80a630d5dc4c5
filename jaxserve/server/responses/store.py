"""Responses that may be asked for again, or gone on from: as many as fit, the longest unused ones leave first."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxserve.errors import QueueFullError, RequestError
from jaxserve.server.errors import NotFoundError
from jaxserve.server.jsonio import dumps

__all__ = ["MAX_STORED_BYTES", "Kept", "Run", "Store"]

MAX_STORED_BYTES = 256 * 2**20
"""Of all stored responses, conversations included, as JSON."""

_EVENT_BYTES = 1024  # what an event of a few letters takes in memory


class Run:
    """A response that is written in the background, and what was told of it.

    Attributes:
        task: the work.
        told: events so far, if they are kept.
    """

    def __init__(self, task: asyncio.Task[None] | None = None) -> None:
        self.task = task
        self.told: list[dict[str, Any]] = []
        self._ended = False
        self._news = asyncio.Event()

    def tell(self, event: dict[str, Any]) -> None:
        """Add an event, for those who follow."""
        self.told.append(event)
        self._wake()

    def end(self) -> None:
        """There will be no more events."""
        self._ended = True
        self._wake()

    async def follow(self, first: int = 0) -> AsyncGenerator[dict[str, Any], None]:
        """Events from number ``first`` on, those to come too."""
        while True:
            news = self._news
            while first < len(self.told):
                yield self.told[first]
                first += 1
            if self._ended:
                return
            await news.wait()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


@dataclass
class Kept:
    """A stored response.

    Attributes:
        response: its object, which may still change.
        conversation: all that was said before it, as JSON arrays of items, its request's last; its own items are in its
            output.
        run: its work, if it was asked for in the background.
        streams: whether its events are kept.
        size: bytes, as far as it is known.
    """

    response: dict[str, Any]
    conversation: Sequence[bytes]
    run: Run | None = None
    streams: bool = False
    size: int = field(init=False, default=0)

    @property
    def unfinished(self) -> bool:
        """Whether it is being written."""
        return self.response["status"] in ("queued", "in_progress")

    def measure(self) -> int:
        """Bytes that it takes as JSON."""
        told = sum(map(len, self.conversation))
        events = len(self.run.told) if self.run is not None else 0
        return told + len(dumps(self.response)) * (2 if self.streams else 1) + events * _EVENT_BYTES


class Store:
    """Responses by id.

    Args:
        most: how many are kept.
        most_bytes: and of what size altogether.
    """

    def __init__(self, most: int, most_bytes: int = MAX_STORED_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._size = 0

    def get(self, response_id: str) -> Kept:
        """The response of this id, which counts as used now. NotFoundError: there is none."""
        kept = self._kept.get(response_id)
        if kept is None:
            raise NotFoundError(f"there is no response {response_id[:80]!r}; it may have left the store.")
        self._kept.move_to_end(response_id)
        return kept

    def put(self, kept: Kept) -> None:
        """Keep a response, or measure it anew. QueueFullError: too many are still being written.

        RequestError: it is still being written, and none are kept here.
        """
        response_id = kept.response["id"]
        if kept.unfinished and not self._most:
            raise RequestError("background needs a server that stores responses.", "background")
        if kept.unfinished and sum(other.unfinished for other in self._kept.values()) >= self._most:
            raise QueueFullError(f"{self._most} responses are being written in the background; that is the limit.")
        self._forget(response_id)
        kept.size = kept.measure()
        self._kept[response_id] = kept
        self._size += kept.size
        for other_id, other in tuple(self._kept.items()):
            if len(self._kept) <= self._most and self._size <= self._most_bytes:
                break
            if not other.unfinished:
                self._forget(other_id)

    def remove(self, response_id: str) -> Kept:
        """Forget a response. NotFoundError: there is none."""
        kept = self.get(response_id)
        self._forget(response_id)
        return kept

    def _forget(self, response_id: str) -> None:
        if (kept := self._kept.pop(response_id, None)) is not None:
            self._size -= kept.size
