"""Bodies of requests: small ones are read at once, large ones in a process of their own.

Python holds its lock while it parses JSON, checks it, and frees what is left: 0.3 s for 17 MB of token ids, 2 s for
100,000 messages, in threads too, while no other request gets its tokens. Another process takes such a body apart, down
to what is small: see ``bodies``. Endpoints say how: by functions of a module, which are called by their names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from jaxserve.errors import QueueFullError
from jaxserve.server.bodies import Rules
from jaxserve.server.helper import Helper
from jaxserve.server.jsonio import check_type, read_chunks

__all__ = ["LARGE", "Intake"]

LARGE = 32 * 2**10
"""Bytes from which a body is worth the detour: the worst of this size takes 6 ms."""

_MOST_WAITING = 256 * 2**20  # bytes of large bodies that are being read, or wait for that

Result = TypeVar("Result")
Reads = Callable[[Rules, bytes], Result]


class Intake:
    """Reads the bodies of one app's requests."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._helper = Helper(rules)
        # Large bodies wait for each other and not for the threads that serve all.
        self._waiting = ThreadPoolExecutor(max_workers=1, thread_name_prefix="jaxserve-intake")
        self._num_waiting = 0  # bytes

    async def read(self, request: Request, small: Reads[Result], large: Reads[Result]) -> Result:
        """The body of a request as ``small`` reads it, or if it is large ``large``, elsewhere.

        RequestError: it is not what it should be. QueueFullError: too much is waiting.
        """
        check_type(request)
        return await self.make(await read_chunks(request), small, large)

    async def compute(self, request: Request, function: Reads[Result]) -> Result:
        """What ``function`` makes of a request's body that tells all: in a thread, or if it is large, elsewhere."""
        check_type(request)
        chunks = await read_chunks(request)
        if sum(map(len, chunks)) < LARGE:
            return await run_in_threadpool(function, self.rules, b"".join(chunks))
        return await self.make(chunks, function, function)

    async def make(self, chunks: Sequence[bytes], small: Reads[Result], large: Reads[Result]) -> Result:
        """As ``read`` for data that does not come from a client."""
        size = sum(map(len, chunks))
        if size < LARGE:
            return small(self.rules, b"".join(chunks))
        if self._num_waiting + size > _MOST_WAITING and self._num_waiting:
            raise QueueFullError("too many large bodies are waiting to be read.")
        # In pieces: copying 16 MB takes milliseconds.
        self._num_waiting += size
        reading = asyncio.get_running_loop().run_in_executor(self._waiting, self._helper.call, large, chunks)
        reading.add_done_callback(lambda _: self._let_go(size))
        return await reading

    def _let_go(self, size: int) -> None:
        self._num_waiting -= size

    def close(self) -> None:
        """End the other process; what it has not read is not answered."""
        self._waiting.shutdown(wait=False, cancel_futures=True)
        self._helper.close()
