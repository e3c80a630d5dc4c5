"""Grammars over llguidance: JSON schemas, regular expressions, choices and context-free grammars as a constraint.

A grammar is compiled once, in a thread of its own, and kept; each request gets a copy of the compiled state, which
costs microseconds. llguidance bounds the work of compiling and of each mask by counting it ("fuel"), so that nothing
hangs for long in a hostile grammar; who waits for one gives up after a time limit anyway.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from threading import Lock
from typing import Any, TypeVar

import llguidance
import numpy as np
from numpy.typing import NDArray

from jaxserve.errors import RequestError
from jaxserve.sampling_params import StructuredOutputsParams
from jaxserve.structured.sources import refusal, source_of
from jaxserve.structured.vocabulary import Vocabulary, make_tokenizer

__all__ = ["Grammar", "GrammarConstraint", "Grammars"]

_COMPILE_SECONDS = 5.0
_MAX_KEPT = 128
_THREADS = 4
_STACK_BYTES = 2**28

_T = TypeVar("_T")
_stack_size = Lock()  # a setting of the whole process


class GrammarConstraint:
    """Where one output stands in its grammar.

    Tokens after the grammar's end, or after one that it does not know, are counted but not followed; then nothing is
    legal, and whoever holds this lets the output end.

    Attributes:
        error: why the grammar cannot be followed any further (a limit was reached), None while it can.
    """

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher
        self._beyond = 0
        self.error: str | None = None

    def mask(self, bits: NDArray[np.uint32]) -> None:
        if self._beyond or self.error:
            bits[:] = 0
            return
        legal = np.zeros_like(bits)
        self._matcher.unsafe_compute_mask_ptr(legal.ctypes.data, legal.nbytes)
        if self._matcher.is_error():
            self.error = _reason(self._matcher)
        bits &= legal

    def advance(self, tokens: tuple[int, ...]) -> None:
        for token in tokens:
            # An illegal token would put the matcher into a state from which there is no way back.
            followed = not (self._beyond or self.error) and self._matcher.validate_tokens([token]) == 1
            if not followed or self._matcher.try_consume_tokens([token]) != 1:
                self._beyond += 1

    def rollback(self, num_tokens: int) -> None:
        beyond = min(num_tokens, self._beyond)
        self._beyond -= beyond
        if num_tokens > beyond and self.error is None:
            self._matcher.rollback(num_tokens - beyond)


class Grammar:
    """A compiled grammar."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher
        self._lock = Lock()

    def constraint(self) -> GrammarConstraint:
        """The state of a new output."""
        with self._lock:
            return GrammarConstraint(self._matcher.deep_copy())


class Grammars:
    """Compiles grammars for one vocabulary, and keeps them; may be used from several threads.

    Args:
        vocabulary: makes it when the first grammar needs it, which takes a second for a large one.
        compile_seconds: how long a request waits for its grammar.
        limits: of the work for one grammar and one mask.
    """

    def __init__(
        self,
        vocabulary: Callable[[], Vocabulary],
        *,
        compile_seconds: float = _COMPILE_SECONDS,
        limits: llguidance.LLParserLimits | None = None,
    ) -> None:
        self._make_vocabulary = vocabulary
        self._compile_seconds = compile_seconds
        self._limits = limits or llguidance.LLParserLimits(verbose_errors=False)
        self._kept: OrderedDict[tuple[Any, ...], Future[Grammar]] = OrderedDict()
        self._lock = Lock()
        self._prepared: Future[tuple[Vocabulary, llguidance.LLTokenizer | None]] | None = None

    def compile(self, wanted: StructuredOutputsParams) -> Future[Grammar]:
        """The grammar, when it is ready; its exception is a RequestError for one that is invalid or too complex."""
        self.prepare()  # before all others in the queue, as they wait for it
        key = _key(wanted)
        with self._lock:
            future = self._kept.get(key)
            if future is None:
                future = self._kept[key] = self._submit(self._compile, wanted)
                if len(self._kept) > _MAX_KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(key)
        future.add_done_callback(partial(self._forget_failure, key))
        return future

    def get(self, wanted: StructuredOutputsParams) -> Grammar:
        """The grammar; waits for it. RequestError: it is invalid, too complex, or not ready within the time limit."""
        self.prepare().result()
        try:
            return self.compile(wanted).result(self._compile_seconds)
        except TimeoutError:
            raise self._late(wanted) from None

    async def ready(self, wanted: StructuredOutputsParams | None) -> None:
        """Wait without blocking until ``get`` will not. RequestError: as there."""
        if wanted is None:
            return
        await _done(self.prepare(), None)
        if not await _done(self.compile(wanted), self._compile_seconds):
            raise self._late(wanted)

    def prepare(self) -> Future[tuple[Vocabulary, llguidance.LLTokenizer | None]]:
        """Begin to prepare for the vocabulary, which the first grammar waits for: what llguidance makes of it.

        That is None without a token that ends a text.
        """
        with self._lock:
            if self._prepared is None:
                self._prepared = self._submit(self._prepare)
            return self._prepared

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_THREADS, thread_name_prefix="jaxserve-grammar")

    def _submit(self, function: Callable[..., _T], *args: Any) -> Future[_T]:
        # llguidance recurses along chains of rules and references: in a thread of usual size, a long one ends the
        # process. The executor makes its threads in ``submit``.
        with _stack_size:
            before = threading.stack_size(_STACK_BYTES)
            try:
                return self._pool.submit(function, *args)
            finally:
                threading.stack_size(before)

    def _prepare(self) -> tuple[Vocabulary, llguidance.LLTokenizer | None]:
        vocabulary = self._make_vocabulary()
        return vocabulary, make_tokenizer(vocabulary)

    def _forget_failure(self, key: tuple[Any, ...], future: Future[Grammar]) -> None:
        if future.cancelled() or future.exception() is not None:
            with self._lock:
                self._kept.pop(key, None)

    def _compile(self, wanted: StructuredOutputsParams) -> Grammar:
        vocabulary, tokenizer = self.prepare().result()
        if tokenizer is None:
            raise RequestError(
                "structured_outputs needs a model with an end-of-sequence token; this one has none.",
                "structured_outputs",
            )
        source = source_of(wanted, vocabulary)
        matcher = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=self._limits)
        if not matcher.is_error():
            # The first mask builds most of the automaton: better here than on the engine's thread.
            matcher.compute_bitmask()
        if matcher.is_error():
            raise refusal(wanted.kind, _reason(matcher))
        return Grammar(matcher)

    def _late(self, wanted: StructuredOutputsParams) -> RequestError:
        limit = f"{self._compile_seconds:g} seconds"
        return refusal(wanted.kind, f"it was not compiled within {limit}, which is the limit")


async def _done(future: Future[Any], seconds: float | None) -> bool:
    """Wait for a future, whose exception is raised; False if it takes longer. Nothing is cancelled."""
    waiting = asyncio.wrap_future(future)
    # Somebody may have gone by the time it fails: then nobody is to be told.
    waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
    await asyncio.wait({waiting}, timeout=seconds)
    if waiting.done():
        waiting.result()
    return waiting.done()


def _key(wanted: StructuredOutputsParams) -> tuple[Any, ...]:
    settings = (wanted.disable_any_whitespace, wanted.disable_additional_properties, wanted.whitespace_pattern)
    return wanted.kind, wanted.text, settings, wanted.reasoning


def _reason(matcher: llguidance.LLMatcher) -> str:
    """The line of llguidance's message that says what is wrong; others repeat the grammar, which may be long."""
    lines = [line.strip() for line in matcher.get_error().removesuffix("<non-verbose/>").splitlines()]
    named = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), None)
    return (named or next(filter(None, lines), "unknown reason"))[:300]
