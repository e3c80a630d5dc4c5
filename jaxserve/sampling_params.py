"""What a request may ask of generation, checked once, before anything is queued.

Names, ranges and defaults follow vLLM's ``SamplingParams`` (which extends the OpenAI API). Checks that need the model's
vocabulary are made in ``engine.input``; everything else here, so that an invalid value never reaches the engine.
"""

from __future__ import annotations

import json
import operator
import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from jaxserve.errors import RequestError

__all__ = ["MAX_LOGPROBS", "MAX_N", "MAX_STOP_STRINGS", "SamplingParams", "StructuredOutputsParams"]

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_N = 128
_MAX_BIAS = 100
_LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
_SEED_RANGE = (-(2**63), 2**64 - 1)
_MAX_GRAMMAR = 2**18
_MAX_CHOICES = 2**14


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """What the text of an output must look like: exactly one of the first six, which have vLLM's names.

    Attributes:
        json: a JSON schema, as an object or as text; the output is JSON that satisfies it.
        json_object: the output is a JSON object, whatever it holds.
        structural_tag: ``{"structures": [{"begin", "schema", "end"}], "triggers": [text]}``, as an object or as text:
            the output is free, but where a trigger appears, a structure follows that begins with it.
        regex: the whole output matches this regular expression (without look-around).
        choice: the output is one of these texts.
        grammar: a context-free grammar, in Lark's form as llguidance extends it, or in GBNF.
        disable_any_whitespace: no whitespace between the parts of JSON.
        disable_additional_properties: objects of the schema that do not say so themselves take no further properties.
        whitespace_pattern: a regular expression for whitespace between the parts of JSON; by default 20 characters at
            most, since models like to lose themselves in it.
        reasoning: (start, end) of free text that comes before. It ends with ``end``; where ``start`` is not empty it
            may be left out, else the output begins inside it.
    """

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    reasoning: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        if self.choice is not None:
            if isinstance(self.choice, str) or not isinstance(self.choice, Iterable):
                raise _unstructured("choice", f"must be a list, got {_shown(self.choice)}")
            object.__setattr__(self, "choice", tuple(self.choice))
        if not self.json_object and self.json_object is not None:
            object.__setattr__(self, "json_object", None)
        given = [name for name in _STRUCTURES if getattr(self, name) is not None]
        if len(given) != 1:
            found = f"got {' and '.join(given)}" if given else "got none"
            raise RequestError(
                f"structured_outputs must hold exactly one of {', '.join(_STRUCTURES)}; {found}.", "structured_outputs"
            )
        self._check_types()
        if len(self.text) > _MAX_GRAMMAR:
            raise _unstructured(self.kind, f"is {len(self.text)} characters long; the limit is {_MAX_GRAMMAR}")

    def _check_types(self) -> None:
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise _unstructured(name, f"must be a non-empty string, got {_shown(value)}")
        for name in ("json_object", "disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name) or False, bool):
                raise _unstructured(name, f"must be true or false, got {_shown(getattr(self, name))}")
        if self.choice is not None:
            if not 0 < len(self.choice) <= _MAX_CHOICES:
                raise _unstructured("choice", f"holds {len(self.choice)} texts, but must hold 1 to {_MAX_CHOICES}")
            for text in self.choice:
                if not isinstance(text, str) or not text:
                    raise _unstructured("choice", f"must hold non-empty strings, got {_shown(text)}")
        if isinstance(self.structural_tag, str):
            object.__setattr__(self, "structural_tag", _parsed(self.structural_tag, "structural_tag"))
        if isinstance(self.json, str):
            object.__setattr__(self, "json", _parsed(self.json, "json"))
        if self.json is not None and not isinstance(self.json, dict | bool):
            raise _unstructured("json", f"must be a JSON schema (an object), got {_shown(self.json)}")

    @property
    def kind(self) -> str:
        """Which of the six it is."""
        return next(name for name in _STRUCTURES if getattr(self, name) is not None)

    @property
    def text(self) -> str:
        """What is to be compiled, as text: with ``kind`` and the settings it says all."""
        value = getattr(self, self.kind)
        if isinstance(value, str):
            return value
        try:
            return json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise _unstructured(self.kind, f"cannot be written as JSON: {error}") from None


_STRUCTURES = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


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
        min_tokens, max_tokens: bounds on the output's length in tokens; None leaves it to the context length. With
            ``prompt_logprobs``, ``max_tokens`` may be 0.
        logprobs: None is off; 0 gives the chosen token's log probability; k adds the k likeliest.
        logprobs_mode: ``processed_logprobs`` are those of the distribution that tokens were sampled from: behind
            penalties, bias and what is forbidden, temperature and filters. Those of prompts are always raw.
        prompt_logprobs: as ``logprobs``, of the prompt's tokens; all of it is computed then, cached or not.
        logit_bias: token id -> value added to its logit, from -100 to 100.
        allowed_token_ids: only these may be sampled.
        bad_words: strings that must not appear.
        skip_special_tokens, include_stop_str_in_output: how the output's text is made.
        detokenize: whether there is a text at all; without one, no string can be looked for in it (``stop``).
        structured_outputs: what the output must look like; it ends where the structure does. ``ignore_eos`` then means
            that it goes on for as long as the structure allows.
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
    logprobs_mode: str = "raw_logprobs"
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    structured_outputs: StructuredOutputsParams | None = None

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
        wanted = self.structured_outputs
        if wanted is not None and not isinstance(wanted, StructuredOutputsParams):
            raise RequestError(
                f"structured_outputs must be StructuredOutputsParams, got {_shown(wanted)}.", "structured_outputs"
            )

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
            ("max_tokens", 1 if self.prompt_logprobs is None else 0, 2**63 - 1),
            ("logprobs", 0, MAX_LOGPROBS),
            ("prompt_logprobs", 0, MAX_LOGPROBS),
            ("seed", *_SEED_RANGE),
        ):
            if getattr(self, name) is not None:
                _integer(self, name, low, high)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens}).", "min_tokens"
            )
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, got {getattr(self, name)!r}.", name)

        if self.logprobs_mode not in _LOGPROBS_MODES:
            raise RequestError(
                f"logprobs_mode must be one of {', '.join(_LOGPROBS_MODES)}, got {_shown(self.logprobs_mode)}.",
                "logprobs_mode",
            )

    def _check_lists(self) -> None:
        if self.stop and not self.detokenize:
            raise RequestError("stop needs a text to look into, and detokenize is false.", "stop")
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


def _unstructured(name: str, why: str) -> RequestError:
    return RequestError(f"structured_outputs.{name} {why}.", "structured_outputs")


def _parsed(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _unstructured(name, f"is no JSON: {error}") from None


def _shown(value: Any) -> str:
    # Integers of thousands of digits help nobody, and repr refuses them.
    huge = isinstance(value, int) and value.bit_length() > 128
    return f"an integer of {value.bit_length()} bits" if huge else reprlib.repr(value)
