"""The gate before an engine: while it is closed, new requests wait outside."""

from __future__ import annotations

import asyncio

from jaxserve.errors import RequestError

__all__ = ["PAUSES", "Gate"]

PAUSES = ("abort", "wait", "keep")
"""What becomes of running requests when the gate closes: they end at once, or as they would, or stand still."""


class Gate:
    """Belongs to one event loop.

    Attributes:
        pause: how it was closed, None while it is open.
    """

    def __init__(self) -> None:
        self.pause: str | None = None
        self._waiting: dict[str, asyncio.Event] = {}

    @property
    def is_frozen(self) -> bool:
        """Whether running requests stand still; may be asked from any thread."""
        return self.pause == "keep"

    async def passed(self, request_id: str) -> None:
        """Wait until the gate is open, or the request is let through."""
        if self.pause is None:
            return
        event = self._waiting.setdefault(request_id, asyncio.Event())
        try:
            await event.wait()
        finally:
            del self._waiting[request_id]

    def let_through(self, request_id: str) -> None:
        """Let one request pass, for it is to end."""
        if (event := self._waiting.get(request_id)) is not None:
            event.set()

    def close(self, how: str) -> None:
        """Close it. RequestError: ``how`` is none of PAUSES."""
        if how not in PAUSES:
            raise RequestError(f"mode must be one of {', '.join(PAUSES)}, got {how[:40]!r}.", "mode")
        self.pause = how

    def open(self) -> None:
        """Let all pass."""
        self.pause = None
        for event in self._waiting.values():
            event.set()

    def is_outside(self, request_id: str) -> bool:
        """Whether a request waits."""
        return request_id in self._waiting
