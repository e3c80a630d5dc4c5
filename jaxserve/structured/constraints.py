"""What sampling parameters forbid: tokens outside ``allowed_token_ids``, ``bad_words``, an end before ``min_tokens``,
and what a grammar does not know.

Each is a small constraint over sets made once per request; ``All`` is their conjunction, and ``make_constraint`` picks
those that a request needs. They count and compare output tokens only, never the prompt.

A conjunction can leave nothing to sample. Where the parameters alone say so, ``make_constraint`` refuses the request;
where it depends on the output (a bad word of several tokens, the end of a grammar), ``All`` falls back to tokens that
end the output.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from jaxserve.errors import RequestError
from jaxserve.sampling_params import SamplingParams
from jaxserve.structured.grammar import Grammar
from jaxserve.structured.masks import all_tokens, pack
from jaxserve.structured.protocol import Constraint

__all__ = ["All", "AllowedTokens", "BadWords", "MinTokens", "make_constraint"]

_ENDLESS = 2**62  # tokens: more than any output has


class AllowedTokens:
    """Only tokens of one set may be sampled."""

    error = None

    def __init__(self, tokens: Iterable[int], vocab_size: int) -> None:
        self._allowed = pack(tokens, vocab_size)

    def mask(self, bits: NDArray[np.uint32]) -> None:
        bits &= self._allowed

    def advance(self, tokens: tuple[int, ...]) -> None:
        """Nothing to do: the set is always the same."""

    def rollback(self, num_tokens: int) -> None:
        """Nothing to do: the set is always the same."""


class MinTokens:
    """Tokens that end the output are forbidden until it holds ``min_tokens`` tokens."""

    error = None

    def __init__(self, min_tokens: int, stop_ids: Iterable[int], vocab_size: int) -> None:
        self._min_tokens = min_tokens
        self._others = all_tokens(vocab_size) & ~pack(stop_ids, vocab_size)
        self._count = 0

    def mask(self, bits: NDArray[np.uint32]) -> None:
        if self._count < self._min_tokens:
            bits &= self._others

    def advance(self, tokens: tuple[int, ...]) -> None:
        self._count += len(tokens)

    def rollback(self, num_tokens: int) -> None:
        self._count -= num_tokens


class BadWords:
    """Token sequences that the output must not contain.

    A sequence is kept out by forbidding its last token where the output ends in the others; a single token is forbidden
    everywhere.
    """

    error = None

    def __init__(self, words: Iterable[Sequence[int]], vocab_size: int) -> None:
        singles: list[int] = []
        # Looked up by the token before the last, so that a step compares only sequences that may be about to complete.
        self._endings: dict[int, list[tuple[list[int], int]]] = {}
        for word in words:
            *before, last = word
            if before:
                self._endings.setdefault(before[-1], []).append((before, last))
            else:
                singles.append(last)
        self._others = all_tokens(vocab_size) & ~pack(singles, vocab_size)
        self._output: list[int] = []

    def mask(self, bits: NDArray[np.uint32]) -> None:
        bits &= self._others
        if not self._output:
            return
        for before, last in self._endings.get(self._output[-1], ()):
            if self._output[-len(before) :] == before:
                bits[last // 32] &= ~np.uint32(1 << last % 32)

    def advance(self, tokens: tuple[int, ...]) -> None:
        self._output += tokens

    def rollback(self, num_tokens: int) -> None:
        del self._output[len(self._output) - num_tokens :]


class All:
    """Every one of several constraints; ``fallback`` [ceil(V / 32)] is legal where they leave nothing.

    It is the outermost constraint of a request, as it may set bits again.
    """

    def __init__(self, parts: Sequence[Constraint], fallback: NDArray[np.uint32]) -> None:
        self._parts = tuple(parts)
        self._fallback = fallback

    @property
    def error(self) -> str | None:
        return next((part.error for part in self._parts if part.error is not None), None)

    def mask(self, bits: NDArray[np.uint32]) -> None:
        for part in self._parts:
            part.mask(bits)
        if not bits.any():
            bits[:] = self._fallback

    def advance(self, tokens: tuple[int, ...]) -> None:
        for part in self._parts:
            part.advance(tokens)

    def rollback(self, num_tokens: int) -> None:
        for part in self._parts:
            part.rollback(num_tokens)


def make_constraint(
    params: SamplingParams,
    *,
    vocab_size: int,
    stop_ids: frozenset[int],
    bad_word_ids: list[list[int]],
    grammar: Grammar | None = None,
) -> Constraint | None:
    """The constraint of a new request, or None if it may sample anything.

    Args:
        params: of these, ``allowed_token_ids``, ``min_tokens`` and, with a grammar, ``ignore_eos`` are read.
        vocab_size: V.
        stop_ids: token ids that end the output; those outside the vocabulary cannot be sampled and do not matter.
        bad_word_ids: token sequences of ``params.bad_words``, in every spelling that is to be kept out.
        grammar: that of ``params.structured_outputs``. With ``ignore_eos`` the output ends where it must.

    Where the output leads to a place at which nothing is legal, the stop ids are, so that it ends there, maybe before
    ``min_tokens``. Without stop ids, ``allowed_token_ids`` holds and the bad word does not.

    Raises:
        RequestError: an id is outside the vocabulary, or the parameters contradict each other.
    """
    _check_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    for word in bad_word_ids:
        if not word:
            raise RequestError("bad_words: a word has no tokens.", "bad_words")
        _check_ids("bad_words", word, vocab_size)
    stops = {token for token in stop_ids if 0 <= token < vocab_size}
    _check_contradictions(params, vocab_size, stops, {word[0] for word in bad_word_ids if len(word) == 1})

    parts: list[Constraint] = []
    if params.allowed_token_ids is not None:
        parts.append(AllowedTokens(params.allowed_token_ids, vocab_size))
    if bad_word_ids:
        parts.append(BadWords(bad_word_ids, vocab_size))
    endless = grammar is not None and params.ignore_eos
    if stops and (endless or params.min_tokens):
        parts.append(MinTokens(_ENDLESS if endless else params.min_tokens, stops, vocab_size))
    if grammar is not None:
        parts.append(grammar.constraint())
    if not parts:
        return None
    if stops:
        fallback = pack(stops, vocab_size)
    elif params.allowed_token_ids is not None:
        fallback = pack(params.allowed_token_ids, vocab_size)
    else:
        fallback = all_tokens(vocab_size)
    return All(parts, fallback)


def _check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise RequestError(f"{name}: token id {token} is outside the vocabulary (0 to {vocab_size - 1}).", name)


def _check_contradictions(params: SamplingParams, vocab_size: int, stops: set[int], bad: set[int]) -> None:
    """Refuse parameters that leave no first token, whatever the model says."""
    allowed: set[int] | range = range(vocab_size)
    whole = "the vocabulary"
    if params.allowed_token_ids is not None:
        allowed, whole = set(params.allowed_token_ids), "allowed_token_ids"
    if all(token in bad for token in allowed):
        raise RequestError(f"bad_words forbids every token of {whole}.", "bad_words")
    if params.min_tokens and all(token in bad or token in stops for token in allowed):
        raise RequestError(
            f"min_tokens is {params.min_tokens}, but every token of {whole} ends the output or is a bad word.",
            "min_tokens",
        )
