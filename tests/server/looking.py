"""A client of ``/debug/live``: reads events, and keeps the map that they tell of."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

__all__ = ["Map", "parse_event", "read_events"]


def parse_event(text: str) -> tuple[str, Any]:
    """Name and data of an event's lines."""
    name, data = text.split("\n", 1)
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def read_events(response: httpx.Response) -> AsyncIterator[tuple[str, Any]]:
    """The events of a stream, without comments."""
    lines: list[str] = []
    async for line in response.aiter_lines():
        if line:
            lines.append(line)
        elif lines and not lines[0].startswith(":"):
            yield parse_event("\n".join(lines))
            lines = []
        else:
            lines = []


class Map:
    """The map as a page draws it: whole at a start, then changed by states.

    Attributes:
        about: the newest start without its map, and ``state`` the newest state.
        owners, refs: by cell.
    """

    def __init__(self) -> None:
        self.about: dict[str, Any] = {}
        self.state: dict[str, Any] = {}
        self.owners: NDArray[np.uint16] = np.zeros(0, np.uint16)
        self.refs: NDArray[np.uint8] = np.zeros(0, np.uint8)

    def read(self, text: str) -> None:
        """Lines of one or more events."""
        for part in text.strip().split("\n\n"):
            self.take(*parse_event(part))

    def take(self, name: str, data: dict[str, Any]) -> None:
        """One event."""
        if name == "start":
            self.owners = _numbers(data.pop("owners"), "<u2").copy()
            self.refs = _numbers(data.pop("refs"), "u1").copy()
            self.about = data
            return
        assert name == "state", data
        changed = data["changed"]
        cells = _numbers(changed["blocks"], "<u4")
        self.owners[cells] = _numbers(changed["owners"], "<u2")
        self.refs[cells] = _numbers(changed["refs"], "u1")
        self.state = data

    @property
    def num_used(self) -> int:
        """Blocks of running requests."""
        return int((self.owners >= 2).sum())

    def check(self) -> None:
        """Assert that the map and the counts of the newest state agree."""
        counts = self.state["counts"]
        drawn = {"free": (self.owners == 0).sum(), "cached": (self.owners == 1).sum(), "used": self.num_used}
        assert drawn == {name: counts[name] for name in drawn}
        assert len(self.owners) == len(self.refs) == self.about["num_blocks"] == sum(drawn.values())
        assert ((self.refs > 0) == (self.owners >= 2)).all()
        running = [row for row in self.state["requests"] if row["state"] == "running"]
        assert {int(key) for key in self.owners if key >= 2} <= {row["key"] for row in running}
        assert int(self.refs.sum()) == sum(row["num_blocks"] for row in running)


def _numbers(text: str, dtype: str) -> NDArray[Any]:
    return np.frombuffer(base64.b64decode(text), dtype)
