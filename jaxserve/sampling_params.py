"""What a request may ask of generation, checked once, before anything is queued.

Names, ranges and defaults follow vLLM's ``SamplingParams`` (which extends the OpenAI API). Checks that need the model's
vocabulary are made in ``engine.input``; everything else here, so that an invalid value never reaches the engine.
"""

from __future__ import annotations

import operator
import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from jaxserve.errors import RequestError

__all__ = ["MAX_LOGPROBS", "MAX_STOP_STRINGS", "SamplingParams"]

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_N = 128
_MAX_BIAS = 100
_SEED_RANGE = (-(2**63), 2**64 - 1)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one request.

    Attributes:
        n: number of completions of the one prompt; its KV is computed once and shared.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k likeliest tokens; 0 or -1 is off.
        top_p: keep the smallest set of likeliest tokens whose probability reaches it.
        min_p: drop tokens less likely than ``min_p`` times the likeliest.
        presence_penalty, frequency_penalty: subtracted once, or per occurrence, for tokens of the output.
        repetition_penalty: divides positive (multiplies negative) logits of tokens in prompt or output, once.
        seed: any 64-bit integer; None or -1 draws one. Noise depends on (seed, position) alone.
        stop: strings that end the output; the one that completes earliest wins.
        stop_token_ids: token ids that end the output.
        ignore_eos: do not end at the model's end-of-sequence tokens.
        min_tokens, max_tokens: bounds on the output's length in tokens; None leaves it to the context length.
        logprobs: None is off; 0 gives the chosen token's log probability; k adds the k likeliest (of the raw logits).
        logit_bias: token id -> value added to its logit, from -100 to 100.
        allowed_token_ids: only these may be sampled.
        bad_words: strings that must not appear.
        skip_special_tokens, include_stop_str_in_output: how the output's text is made.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    logprobs: int | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words", "stop_token_ids", "allowed_token_ids"):
            value = getattr(self, name)
            if isinstance(value, str) and name in ("stop", "bad_words"):
                value = (value,)
            elif value is None and name != "allowed_token_ids":
                value = ()
            if value is not None:
                object.__setattr__(self, name, _listed(value, name))
        if self.seed == -1:
            object.__setattr__(self, "seed", None)
        self._check_numbers()
        self._check_lists()
        self._check_logit_bias()

    def _check_numbers(self) -> None:
        _integer(self, "n", 1, MAX_N)
        _number(self, "temperature", 0.0, 100.0)
        _integer(self, "top_k", -1, 2**31 - 1)
        _number(self, "top_p", 0.0, 1.0, open_low=True)
        _number(self, "min_p", 0.0, 1.0)
        _number(self, "presence_penalty", -2.0, 2.0)
        _number(self, "frequency_penalty", -2.0, 2.0)
        _number(self, "repetition_penalty", 0.0, 1e4, open_low=True)
        _integer(self, "min_tokens", 0, 2**31 - 1)
        for name, low, high in (
            ("max_tokens", 1, 2**63 - 1),
            ("logprobs", 0, MAX_LOGPROBS),
            ("seed", *_SEED_RANGE),
        ):
            if getattr(self, name) is not None:
                _integer(self, name, low, high)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens}).", "min_tokens"
            )
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, got {getattr(self, name)!r}.", name)

    def _check_lists(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(f"stop holds {len(self.stop)} strings; the limit is {MAX_STOP_STRINGS}.", "stop")
        for name in ("stop", "bad_words"):
            for text in getattr(self, name):
                if not isinstance(text, str) or not text:
                    raise RequestError(f"{name} must hold non-empty strings, got {text!r}.", name)
        for name in ("stop_token_ids", "allowed_token_ids"):
            for token in getattr(self, name) or ():
                if isinstance(token, bool) or not isinstance(token, int):
                    raise RequestError(f"{name} must hold integers, got {token!r}.", name)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids must not be empty.", "allowed_token_ids")

    def _check_logit_bias(self) -> None:
        clean: dict[int, float] = {}
        if not isinstance(self.logit_bias or {}, Mapping):
            raise RequestError(
                f"logit_bias must map token ids to numbers, got {_shown(self.logit_bias)}.", "logit_bias"
            )
        for key, value in (self.logit_bias or {}).items():
            try:
                token = _token_id(key)
            except (TypeError, ValueError):
                raise RequestError(f"logit_bias: key {_shown(key)} is not a token id.", "logit_bias") from None
            # NaN is in no range.
            if isinstance(value, bool) or not isinstance(value, int | float) or not -_MAX_BIAS <= value <= _MAX_BIAS:
                raise RequestError(
                    f"logit_bias: value of {key} must be from -{_MAX_BIAS} to {_MAX_BIAS}, got {_shown(value)}.",
                    "logit_bias",
                )
            clean[token] = float(value)
        object.__setattr__(self, "logit_bias", clean)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @classmethod
    def names(cls) -> frozenset[str]:
        """Names of all parameters."""
        return frozenset(f.name for f in fields(cls))


def _integer(params: SamplingParams, name: str, low: int, high: int) -> None:
    value: Any = getattr(params, name)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(f"{name} must be an integer from {low} to {high}, got {_shown(value)}.", name)


def _number(params: SamplingParams, name: str, low: float, high: float, *, open_low: bool = False) -> None:
    value: Any = getattr(params, name)
    legal = isinstance(value, int | float) and not isinstance(value, bool)
    # NaN fails both comparisons, so it is refused here as well.
    if not legal or not (low < value if open_low else low <= value) or not value <= high:
        bracket = "(" if open_low else "["
        raise RequestError(f"{name} must be in {bracket}{low:g}, {high:g}], got {_shown(value)}.", name)
    object.__setattr__(params, name, float(value))


def _token_id(key: Any) -> int:
    # int() would take " 5 " and "1_0" as well, of which JSON knows nothing.
    if isinstance(key, str) and not re.fullmatch(r"-?[0-9]+", key):
        raise ValueError(key)
    return int(key) if isinstance(key, str) else operator.index(key)


def _listed(value: Any, name: str) -> tuple[Any, ...]:
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
        raise RequestError(f"{name} must be a list, got {_shown(value)}.", name)
    return tuple(value)


def _shown(value: Any) -> str:
    # Integers of thousands of digits help nobody, and repr refuses them.
    huge = isinstance(value, int) and value.bit_length() > 128
    return f"an integer of {value.bit_length()} bits" if huge else reprlib.repr(value)
