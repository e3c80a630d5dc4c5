"""The engine for asyncio: one thread steps, the event loop handles text.

The engine thread sees token ids only. Its events reach the event loop once per step, where they become text and go to
the request's own queue. A generator that is closed (its client has gone) takes its request out of the engine at once.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Self, TypeVar

from jaxserve.config import EngineConfig
from jaxserve.engine.gate import Gate
from jaxserve.engine.live import LiveEngine
from jaxserve.engine.output import OutputProcessor
from jaxserve.engine.startup import Started, start
from jaxserve.engine.streams import Stream, answer_of
from jaxserve.engine.waiting import WaitingLimits
from jaxserve.errors import EngineDeadError, LoadError, ModelNotFoundError, RequestError
from jaxserve.logging import get_logger
from jaxserve.outputs import EngineStats, RequestOutput, TokenEvent
from jaxserve.request import FinishReason
from jaxserve.sampling_params import SamplingParams
from jaxserve.timings import GRAMMAR_EDGES, Timings

__all__ = ["AsyncLLM"]

_log = get_logger(__name__)

_T = TypeVar("_T")


class AsyncLLM:
    """A model for serving: an async stream per request.

    All methods but ``stats`` and ``check_health`` belong to the event loop on which ``generate`` was first called.

    Attributes:
        live: what it shows of itself.
    """

    def __init__(self, started: Started) -> None:
        self.config = started.config
        self.tokenizer = started.tokenizer
        self.model_config = started.model_config
        self.model_name = started.model_name
        self.max_model_len = started.max_model_len
        self.hidden_size = started.model_config.hidden_size
        self.startup_phases = started.phases
        self.adapters = started.adapters
        self._engine = started.engine
        self._input = started.input_processor()
        self._input.grammars.prepare()
        self._output = OutputProcessor(started.tokenizer)
        self.live = LiveEngine(started, self._output, self._ask)
        self._streams: dict[str, Stream] = {}
        self._gate = Gate()
        self._limits = WaitingLimits(started.config.scheduler, started.engine.runner.shape.max_rows)
        self._num_preparing = 0
        self._grammar_seconds = Timings(GRAMMAR_EDGES)
        self._count = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = threading.Condition()
        self._closing = False
        self._dead: str | None = None
        # Of their own: a slow disk or hub must not take the threads that tokenise.
        self._loaders = ThreadPoolExecutor(2, thread_name_prefix="jaxserve-lora")
        self._thread = threading.Thread(target=self._run, name="jaxserve-engine", daemon=True)
        self._thread.start()

    @classmethod
    def from_config(cls, config: EngineConfig, on_progress: Callable[[str, float], None] | None = None) -> Self:
        """Load a model and start its engine; blocks until it can serve. Raises LoadError, ConfigError."""
        return cls(start(config, on_progress))

    # ------------------------------------------------------------------ requests
    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
        stream: bool = True,
        pooling: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt, with the adapter of a name or the base model; closing the generator aborts it.

        Yields deltas as they come, or with ``stream=False`` the one finished output. With ``pooling``
        ("mean" or "last") that holds an embedding of the prompt.

        Raises:
            RequestError: it cannot be served as asked, or there is no such adapter; nothing was queued.
            QueueFullError: too much is waiting already.
            EngineDeadError: the engine has stopped, before or while it was served.
        """
        self.check_health()
        if request_id in self._streams:
            raise RequestError(f"request_id {request_id!r} is that of a request which is being answered.", "request_id")
        self._limits.check(self._engine.scheduler.num_waiting, [entry.size for entry in self._streams.values()])
        self._loop = self._loop or asyncio.get_running_loop()
        entry = self._streams[request_id] = Stream((params.n, 0), self.live.journal.open(request_id, adapter))
        # The caller may use its id again while the engine still has events of the old request under way.
        engine_id = f"{request_id}#{next(self._count)}"
        lease = ExitStack()
        try:
            await self._gate.passed(request_id)
            with self._preparing():
                await self._grammar(params)
                key = await self._take_adapter(adapter, lease)
                # Tokenising a long prompt takes milliseconds, in which the loop must serve others.
                prepare = partial(
                    self._input.prepare, priority=priority, cache_salt=cache_salt, adapter=key, pooling=pooling
                )
                requests = await asyncio.to_thread(prepare, engine_id, prompt, params)
            entry.size = params.n, len(requests[0].prompt)
            entry.entry.queue(requests)
            self._output.add(request_id, prompt if isinstance(prompt, str) else None, requests, stream=stream)
            self._engine.add(requests)
            self._wake_up()
            self.check_health()
            if entry.aborted:
                await self.abort(request_id)
            while True:
                output = await entry.queue.get()
                if isinstance(output, EngineDeadError):
                    raise output
                yield output
                if output.finished:
                    return
        finally:
            self._forget(request_id)
            lease.close()

    async def abort(self, request_id: str) -> None:
        """End a request early; its stream gets a last output with finish reason "abort"."""
        if (entry := self._streams.get(request_id)) is not None:
            entry.aborted = True  # it may not have reached the engine yet
            self._gate.let_through(request_id)
        self._finish(self._output.open_ids(request_id), FinishReason.ABORT)

    def open_requests(self) -> list[str]:
        """Ids of the requests whose generators are open."""
        return list(self._streams)

    # ------------------------------------------------------------------ control
    async def pause(self, how: str = "abort") -> None:
        """Let new requests wait until ``resume``; running ones are aborted, or finished ("wait"), or stand still
        ("keep"). RequestError: ``how`` is something else."""
        self._gate.close(how)
        self._wake_up()  # what stood still may have to go on
        inside = {name: entry for name, entry in self._streams.items() if not self._gate.is_outside(name)}
        if how == "abort":
            for request_id in inside:
                await self.abort(request_id)
        while how != "keep" and self._gate.pause == how and any(map(self._is_served, inside, inside.values())):
            await asyncio.sleep(0.01)

    async def resume(self) -> None:
        """Let requests in again, and running ones go on."""
        self._gate.open()
        self._wake_up()

    @property
    def is_paused(self) -> bool:
        """Whether new requests wait."""
        return self._gate.pause is not None

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing is done, while any request has blocks."""
        return await self._ask(self._engine.scheduler.blocks.reset_prefix_cache)

    # ------------------------------------------------------------------ state
    def has_begun(self, request_id: str) -> bool:
        """Whether an open request has a first token, even if it is answered as a whole."""
        entry = self._streams.get(request_id)  # what has ended is no longer known to the output, but may be unread
        return entry is not None and (not entry.queue.empty() or self._output.has_begun(request_id))

    def stats(self) -> EngineStats:
        """Counts of the engine."""
        return replace(
            self._engine.stats(),
            num_preparing=self._num_preparing,
            grammar_seconds=self._grammar_seconds,
            adapters=self.adapters.stats(),
        )

    def check_health(self) -> None:
        """Raises EngineDeadError if the engine has stopped."""
        if self._dead is not None:
            raise EngineDeadError(self._dead)

    async def shutdown(self, drain_seconds: float = 0.0) -> None:
        """Stop; running requests may take ``drain_seconds`` more, then they are aborted."""
        deadline = asyncio.get_running_loop().time() + drain_seconds
        while self._streams and self._dead is None and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)
        self._loaders.shutdown(wait=False, cancel_futures=True)
        self.adapters.close()
        if self._dead is None:
            self._engine.runner.close()
        self._die("the engine was shut down")

    # ------------------------------------------------------------------ event loop side
    def _is_served(self, request_id: str, entry: Stream) -> bool:
        return self._streams.get(request_id) is entry and not entry.ended

    async def _take_adapter(self, name: str | None, lease: ExitStack) -> bytes | None:
        """Key of an adapter, which is kept until the lease ends; one that only lies in a folder is loaded first."""
        if name is None:
            return None
        try:
            return lease.enter_context(self.adapters.lease(name))
        except ModelNotFoundError:
            _log.debug("adapter %s is not loaded yet", name)
        try:
            await asyncio.get_running_loop().run_in_executor(self._loaders, self.adapters.prepare, name)
        except LoadError as error:
            raise RequestError(str(error), "model") from error
        return lease.enter_context(self.adapters.lease(name))

    @contextmanager
    def _preparing(self) -> Iterator[None]:
        self._num_preparing += 1
        try:
            yield
        finally:
            self._num_preparing -= 1

    async def _grammar(self, params: SamplingParams) -> None:
        """Wait for the request's grammar, if it has one."""
        if params.structured_outputs is None:
            return
        began = time.monotonic()
        try:
            await self._input.grammars.ready(params.structured_outputs)
        finally:
            self._grammar_seconds.add(time.monotonic() - began)

    def _forget(self, request_id: str) -> None:
        entry = self._streams.pop(request_id).entry
        self.live.journal.close(entry, FinishReason.ABORT if self._dead is None else FinishReason.ERROR)
        self._finish(self._output.drop(request_id), FinishReason.ABORT)

    def _deliver(self, events: list[TokenEvent]) -> None:
        try:
            outputs, ended = self._output.process(events)
        except Exception as error:
            # These events are lost, and their requests would wait for ever.
            _log.exception("the engine's output cannot be processed")
            self._die(f"the engine has stopped: {type(error).__name__}: {error}")
            return
        self._finish(ended, FinishReason.STOP)
        for output in outputs:
            if (entry := self._streams.get(output.request_id)) is not None:
                entry.put(output)
                if output.finished:
                    self._limits.note_end()

    def _finish(self, engine_ids: Sequence[str], reason: FinishReason) -> None:
        for engine_id in engine_ids:
            self._engine.finish(engine_id, reason)
        if engine_ids:
            self._wake_up()

    async def _ask(self, function: Callable[[], _T]) -> _T:
        """What a function returns between two steps, on the engine's thread. EngineDeadError: it has stopped."""

        def call(run: Callable[[], None]) -> None:
            self._engine.call(run)
            self._wake_up()

        return await answer_of(function, call, self.check_health)

    def _wake_up(self) -> None:
        with self._wake:
            self._wake.notify()

    def _die(self, why: str) -> None:
        self._dead = self._dead or why
        self._gate.open()
        for entry in self._streams.values():
            entry.queue.put_nowait(EngineDeadError(self._dead))

    # ------------------------------------------------------------------ engine thread
    def _run(self) -> None:
        try:
            while self._wait_for_work():
                if events := self._engine.take_in() if self._gate.is_frozen else self._engine.step():
                    self._call(self._deliver, events)
        except Exception as error:
            _log.exception("the engine has stopped")
            self._dead = f"the engine has stopped: {type(error).__name__}: {error}"
            self._call(self._die, self._dead)

    def _wait_for_work(self) -> bool:
        """Sleep until there is work; False to stop."""
        with self._wake:
            while not self._closing:
                # A frozen engine still hears of requests that end.
                if self._engine.has_news if self._gate.is_frozen else self._engine.has_work:
                    break
                self._wake.wait()
            return not self._closing and self._dead is None

    def _call(self, function: Callable[[Any], None], argument: Any) -> None:
        """Run a function on the event loop; dropped if that has gone (nobody is left to hear of it)."""
        try:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(function, argument)
        except RuntimeError:
            _log.debug("the event loop is closed")
