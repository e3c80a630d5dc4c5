"""Lines of streams, however their bytes arrive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from jaxserve.bench.stream import lines


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_only_line_feeds_end_lines(size: int) -> None:
    content = "data: a\u2028b\x85c\r\n\ndata: é\nlast".encode()

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(content), size):
            yield content[at : at + size]

    async def read() -> list[str]:
        return [line async for line in lines(httpx.Response(200, content=pieces()))]

    assert asyncio.run(read()) == ["data: a\u2028b\x85c", "", "data: é", "last"]
