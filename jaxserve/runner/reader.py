"""What is read of prompts beside their KV: log probabilities of their tokens, and hidden states added up.

A forward pass gives the hidden states of its tokens in chunks of one size, so that the two programs here exist once and
not per bucket. The logits of a chunk live no longer than it takes to measure them: a prompt needs no more memory for
them than ``CHUNK`` tokens do, however long it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxserve.lora.bank import LoraInput, adapt_head
from jaxserve.models.decoder import logits
from jaxserve.plan import PromptPart, PromptRead, RowPlan, TokenLogprobs
from jaxserve.runner.adapters import Adapters
from jaxserve.runner.compiled import Programs
from jaxserve.sampling import measure

__all__ = ["CHUNK", "PromptParts", "PromptReader", "chunks_of"]

CHUNK = 64
"""Tokens of a chunk."""

_SUMS = 8
"""Sums that one call makes of a chunk."""


def chunks_of(hidden: jax.Array) -> tuple[jax.Array, ...]:
    """Hidden states [T, E] as chunks [CHUNK, E]."""
    padded = jnp.pad(hidden, ((0, -hidden.shape[0] % CHUNK), (0, 0)))
    return tuple(jnp.split(padded, padded.shape[0] // CHUNK))


@dataclass(frozen=True, slots=True)
class _Span:
    """Tokens of a row within a chunk: ``first`` … ``first + count - 1`` of it, from the row's ``offset`` on."""

    chunk: int
    first: int
    offset: int
    count: int


class PromptParts:
    """What a step will have read: device arrays on their way to the host."""

    def __init__(self) -> None:
        self._rows: list[tuple[RowPlan, list[_Span]]] = []
        self._scores: dict[int, tuple[jax.Array, ...]] = {}
        self._sums: dict[str, list[tuple[jax.Array, int]]] = {}

    def add(self, row: RowPlan, spans: list[_Span]) -> None:
        """A row is read at these places."""
        self._rows.append((row, spans))

    def add_scores(self, chunk: int, scores: tuple[jax.Array, ...]) -> None:
        """Measures of a chunk's tokens."""
        self._scores[chunk] = _sent(scores)

    def add_sum(self, request_id: str, sums: jax.Array, index: int) -> None:
        """A sum [E] of a row's hidden states is row ``index`` of ``sums``."""
        self._sums.setdefault(request_id, []).append((_sent(sums), index))

    def result(self) -> dict[str, PromptPart]:
        """Wait for the device; what was read by request."""
        chunks = {chunk: tuple(np.asarray(array) for array in arrays) for chunk, arrays in self._scores.items()}
        found = {}
        for row, spans in self._rows:
            read = _wanted(row)
            scores = tuple(_scores(read, spans, chunks)) if read.targets else ()
            sums = [np.asarray(array)[index] for array, index in self._sums.get(row.request_id, ())]
            total = np.sum(sums, axis=0, dtype=np.float64) if sums else None
            found[row.request_id] = PromptPart(row.start, scores, total, read.completes)
        return found


class PromptReader:
    """Dispatches what a step's rows want to have read.

    Args:
        head: the parameters that ``logits`` needs.
        hidden: shape and dtype of hidden states [..., E].
        adapters: those of requests.
    """

    def __init__(self, head: dict[str, Any], hidden: jax.ShapeDtypeStruct, adapters: Adapters) -> None:
        self._head = head
        self._adapters = adapters
        self._chunk = jax.ShapeDtypeStruct((CHUNK, hidden.shape[-1]), hidden.dtype)
        self._programs = Programs(self._lower)

    def programs(self) -> list[tuple[Programs, Any]]:
        """Every program that serving may call, as (programs, key)."""
        adapted = ["adapted score"] if self._adapters.changes_head else []
        return [(self._programs, name) for name in ("score", "sum", *adapted)]

    def read(
        self, ordered: Sequence[RowPlan], query_start: NDArray[np.int32], chunks: Sequence[jax.Array]
    ) -> PromptParts | None:
        """Dispatch the reads of a step's rows, whose tokens begin at ``query_start`` of its chunks; None if there are
        none."""
        if not any(row.read for row in ordered):
            return None
        parts = PromptParts()
        targets: dict[int, NDArray[np.int32]] = {}
        slots: dict[int, list[int]] = {}
        top: set[int] = set()
        sums: dict[int, list[tuple[str, NDArray[np.float32]]]] = {}
        for row, begin in zip(ordered, query_start.tolist(), strict=False):
            if row.read is None:
                continue
            spans = list(_spans(begin, row.read))
            parts.add(row, spans)
            for span in spans:
                part = row.read.targets[span.offset : span.offset + span.count]
                if part:
                    wanted = targets.setdefault(span.chunk, np.zeros(CHUNK, np.int32))
                    wanted[span.first : span.first + len(part)] = part
                    of_chunk = slots.setdefault(span.chunk, [0] * CHUNK)
                    of_chunk[span.first : span.first + len(part)] = [row.adapter_slot] * len(part)
                    top |= {span.chunk} if row.read.num_top else set()
                if (weights := _weights(row.read, span)) is not None:
                    sums.setdefault(span.chunk, []).append((row.request_id, weights))
        for chunk, wanted in targets.items():
            lora = self._adapters.of_tokens(slots[chunk])
            score = self._programs["score" if lora is None else "adapted score"]
            scores = score(self._head, chunks[chunk], wanted, np.bool_(chunk in top), lora)
            parts.add_scores(chunk, scores)
        for chunk, asked in sums.items():
            for first in range(0, len(asked), _SUMS):
                batch = asked[first : first + _SUMS]
                weights = np.zeros((_SUMS, CHUNK), np.float32)
                weights[: len(batch)] = [each for _, each in batch]
                added = self._programs["sum"](chunks[chunk], weights)
                for index, (request_id, _) in enumerate(batch):
                    parts.add_sum(request_id, added, index)
        return parts

    def _lower(self, name: str) -> jax.stages.Lowered:
        if name == "sum":
            return jax.jit(_sum).lower(self._chunk, np.zeros((_SUMS, CHUNK), np.float32))
        lora = self._adapters.like(CHUNK) if name == "adapted score" else None
        return jax.jit(_score).lower(self._head, self._chunk, np.zeros(CHUNK, np.int32), np.bool_(False), lora)


def _score(
    head: dict[str, Any], hidden: jax.Array, targets: jax.Array, wants_top: jax.Array, lora: LoraInput | None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Log probabilities and ranks [CHUNK] of tokens after hidden states, and the likeliest ones, as in ``Sampled``."""
    if lora is not None:
        head = adapt_head(head, lora.bank, lora.slots)
    return measure(logits(head, hidden), targets, wants_top)


def _sum(hidden: jax.Array, weights: jax.Array) -> jax.Array:
    """Weighted sums [n, E] float32 of hidden states [CHUNK, E]."""
    return jnp.dot(weights, hidden.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)


def _spans(begin: int, read: PromptRead) -> Iterator[_Span]:
    """Where the tokens of a row that begins at token ``begin`` of the step lie."""
    offset = 0
    while offset < read.num_tokens:
        chunk, first = divmod(begin + offset, CHUNK)
        count = min(CHUNK - first, read.num_tokens - offset)
        yield _Span(chunk, first, offset, count)
        offset += count


def _weights(read: PromptRead, span: _Span) -> NDArray[np.float32] | None:
    weights = np.zeros(CHUNK, np.float32)
    if read.pooling == "mean":
        weights[span.first : span.first + span.count] = 1
        return weights
    if read.pooling == "last" and read.completes and span.offset + span.count == read.num_tokens:
        weights[span.first + span.count - 1] = 1
        return weights
    return None


def _scores(
    read: PromptRead, spans: Sequence[_Span], chunks: dict[int, tuple[NDArray[Any], ...]]
) -> Iterator[TokenLogprobs]:
    for span in spans:
        for place in range(span.first, span.first + min(span.count, len(read.targets) - span.offset)):
            logprobs, ranks, ids, best = (array[place] for array in chunks[span.chunk])
            top = zip(ids[: read.num_top].tolist(), best[: read.num_top].tolist(), strict=True)
            yield TokenLogprobs(float(logprobs), int(ranks), tuple(top))


def _wanted(row: RowPlan) -> PromptRead:
    assert row.read is not None, "only rows that are read are added"
    return row.read


def _sent(arrays: Any) -> Any:
    """The same arrays, on their way to the host."""
    for array in jax.tree.leaves(arrays):
        array.copy_to_host_async()
    return arrays
