"""Lines of a streamed answer."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx

__all__ = ["lines"]


async def lines(response: httpx.Response) -> AsyncIterator[str]:
    """Lines of a stream. Unlike httpx's they end at line feeds alone: text in JSON may hold other separators."""
    rest = ""
    async for piece in response.aiter_text():
        *whole, rest = (rest + piece).split("\n")
        for line in whole:
            yield line.removesuffix("\r")
    yield rest
