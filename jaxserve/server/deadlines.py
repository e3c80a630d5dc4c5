"""How long a request may take: to its first token, and in all.

What is late is cancelled like a request whose client has gone, so that whatever state it is in (waiting, compiling its
grammar, computing its prompt, generating) it leaves the engine at once, and its blocks with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, aclosing
from typing import Any, cast

from jaxserve.metrics import Metrics
from jaxserve.outputs import RequestOutput
from jaxserve.server.errors import LateError
from jaxserve.server.protocol import Engine

__all__ = ["with_deadlines"]


def with_deadlines(engine: Engine, metrics: Metrics, first_token: float | None, total: float | None) -> Engine:
    """The engine, where ``generate`` raises LateError when one of the limits (seconds, None is none) has passed."""
    if first_token is None and total is None:
        return engine
    return cast(Engine, _Punctual(engine, metrics, first_token, total))


class _Punctual:
    """Everything but ``generate`` is the engine's own."""

    def __init__(self, engine: Engine, metrics: Metrics, first_token: float | None, total: float | None) -> None:
        self._engine = engine
        self._metrics = metrics
        self._first_token = first_token
        self._total = total

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(
        self, prompt: str | Sequence[int], params: Any, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        watch = _Watch(self._engine, request_id, self._first_token, self._total)
        async with aclosing(self._engine.generate(prompt, params, request_id, **options)) as outputs:
            while True:
                try:
                    # Only waiting is limited: between outputs, the task may be anywhere.
                    async with asyncio.timeout(None) as limit:
                        with watch.armed(limit):
                            output = await anext(outputs, None)
                except TimeoutError:
                    if watch.late is None:
                        raise
                    self._metrics.timeouts.labels(stage=watch.late.stage).inc()
                    raise watch.late from None
                if output is None:
                    return
                watch.begun()
                yield output


class _Watch:
    """The limits of one request. A plain answer comes whole, so that only the engine knows whether it has begun."""

    def __init__(self, engine: Engine, request_id: str, first_token: float | None, total: float | None) -> None:
        self.late: LateError | None = None
        self._engine = engine
        self._request_id = request_id
        self._loop = asyncio.get_running_loop()
        self._first_token = first_token
        self._total = total
        self._began = self._loop.time()

    def armed(self, limit: asyncio.Timeout) -> ExitStack:
        """Let ``limit`` end when one of the limits has passed, until the context ends."""
        timers = ExitStack()
        for seconds, is_total in ((self._first_token, False), (self._total, True)):
            if seconds is not None:
                timer = self._loop.call_at(self._began + seconds, self._judge, limit, seconds, is_total)
                timers.callback(timer.cancel)
        return timers

    def begun(self) -> None:
        """An output is there: that was the first token, or later."""
        self._first_token = None

    def _judge(self, limit: asyncio.Timeout, seconds: float, is_total: bool) -> None:
        has_begun = self._engine.has_begun(self._request_id)
        if self.late is None and (is_total or not has_begun):
            self.late = LateError(seconds, has_begun=has_begun, is_total=is_total)
            limit.reschedule(self._loop.time())
