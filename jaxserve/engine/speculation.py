"""From the flags of speculation to settings, and to what decides how many guesses are verified.

Three ways lead to the same settings: vLLM's older flags (``--speculative-model``, …), its newer ones (``--spec-…``) and
its JSON (``--speculative-config``). They may be mixed where they do not contradict each other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxserve.config import SpeculativeConfig
from jaxserve.errors import ConfigError, nearest
from jaxserve.runner import Buckets
from jaxserve.scheduler import AdaptiveSpeculation, FixedSpeculation, NoSpeculation, Speculation
from jaxserve.speculative import Proposer, TypicalAcceptance

__all__ = ["SpeculativeSettings", "make_speculation", "resolve"]

_DEFAULT_DRAFTS = {"ngram": 5, "suffix": 8, "draft_model": 4, "medusa": 4, "eagle": 4}
_TREE_DRAFTS, _TREE_DEPTH = 8, 4
_TRAINED = ("medusa", "eagle")  # methods whose name stands for what train-draft has made
_OTHER_NAMES = {"eagle3": "eagle"}  # vLLM's; what a head is, its files tell
_LONGEST_MATCH = {"ngram": 4, "suffix": 8}
_SHORTEST_MATCH = 2
_CORPUS = 1 << 16  # tokens
_CORPUS_LIMITS = (256, 1 << 24)

_TYPICAL = "typical_acceptance_sampler"
_ACCEPTANCE = ("rejection_sampler", _TYPICAL)

_OWN = {
    "longest": _LONGEST_MATCH,
    "shortest": _LONGEST_MATCH,
    "corpus_size": ("suffix",),
    "width": ("eagle",),
    "depth": ("eagle",),
}
"""Settings that not all methods have, and the methods that have them."""


@dataclass(frozen=True, slots=True)
class SpeculativeSettings:
    """What the flags ask for.

    Attributes:
        method: what guesses.
        model: the draft model or heads, None for a method without any, or for those that were trained here.
        num_drafts: most drafts of a sequence in a step.
        longest, shortest: tokens that a match of a lookup has.
        adaptive: whether it is measured how many drafts pay.
        corpus_size: tokens of earlier answers that are kept, 0 for a method that keeps none.
        typical: which drafts are kept beside right ones, None for none.
        is_default: nobody asked for ``num_drafts``: it may be lowered to what there is.
        width, depth: guesses after each node of a tree, and drafts on its longest path; 1 and None for a chain.
    """

    method: str
    model: str | None
    num_drafts: int
    longest: int
    shortest: int
    adaptive: bool
    corpus_size: int = 0
    typical: TypicalAcceptance | None = None
    is_default: bool = field(default=False, compare=False)
    width: int = 1
    depth: int | None = None


@dataclass(frozen=True, slots=True)
class _Value:
    """A setting, and the flag that it came from."""

    value: Any
    flag: str


def resolve(config: SpeculativeConfig, *, max_tokens: int) -> SpeculativeSettings | None:
    """The settings, or None where no method is asked for.

    Args:
        config: the flags.
        max_tokens: most tokens of a step.

    Raises:
        ConfigError: flags contradict each other, or one has a value that cannot work.
    """
    values = _merge(config)
    method, model = _method(values)
    if method is None:
        unused = next(iter(values.values()), None)
        if unused is not None:
            raise ConfigError(f"{unused.flag} needs a method: set --speculative-model (or --spec-method).")
        return None
    for name, methods in _OWN.items():
        # What is named like a draft model may turn out to be a head.
        if name in values and method not in methods and (method, methods) != ("draft_model", ("eagle",)):
            raise ConfigError(
                f"{values[name].flag} is for {' and '.join(methods)}; the method {method} has no use for it."
            )
    longest, shortest = _match_sizes(values, _LONGEST_MATCH.get(method, 0))
    num_drafts, width, depth = _tree(values, method, max_tokens)
    return SpeculativeSettings(
        method,
        model,
        num_drafts,
        longest,
        shortest,
        config.speculative_adaptive,
        _integer(values, "corpus_size", _CORPUS, *_CORPUS_LIMITS) if method == "suffix" else 0,
        _acceptance(values),
        "num_drafts" not in values,
        width,
        depth,
    )


def _match_sizes(values: Mapping[str, _Value], default: int) -> tuple[int, int]:
    """Most and fewest tokens of a match; ``default`` is the most, if nobody says otherwise, 0 without any lookup."""
    if not default:
        return 0, 0
    if "longest" not in values and "shortest" in values:
        longest = max(default, _integer(values, "shortest", 0, 1, 64))
    else:
        longest = _integer(values, "longest", default, 1, 64)
    shortest = _integer(values, "shortest", min(_SHORTEST_MATCH, longest), 1, 64)
    if shortest > longest:
        raise ConfigError(
            f"{values['shortest'].flag} ({shortest}) must not be more than --ngram-prompt-lookup-max ({longest})."
        )
    return longest, shortest


def _acceptance(values: Mapping[str, _Value]) -> TypicalAcceptance | None:
    """The rule of typical acceptance, if it is asked for."""
    if "acceptance" in values and values["acceptance"].value not in _ACCEPTANCE:
        given = values["acceptance"]
        raise ConfigError(f"{given.flag} must be one of {', '.join(_ACCEPTANCE)}, got {given.value!r}.")
    if "acceptance" not in values or values["acceptance"].value != _TYPICAL:
        for name in ("threshold", "alpha"):
            if name in values:
                raise ConfigError(f"{values[name].flag} needs --spec-decoding-acceptance-method {_TYPICAL}.")
        return None
    threshold = _share(values, "threshold", 0.09)
    return TypicalAcceptance(threshold, _share(values, "alpha", threshold**0.5))


def _tree(values: Mapping[str, _Value], method: str, max_tokens: int) -> tuple[int, int, int | None]:
    """Most drafts, width and depth. A row's newest token and its drafts are one step's work."""
    width = _integer(values, "width", 1, 1, 32)
    if width == 1:
        default = _integer(values, "depth", min(_DEFAULT_DRAFTS[method], max_tokens - 1), 1, max_tokens - 1)
        num_drafts = _integer(values, "num_drafts", default, 1, max_tokens - 1)
        if values.get("depth") is not None and num_drafts != default:
            raise ConfigError(
                f"{values['depth'].flag} is {default}, but {values['num_drafts'].flag} is {num_drafts}: without a tree "
                "(--speculative-eagle-topk) they are the same."
            )
        return num_drafts, 1, None
    depth = _integer(values, "depth", _TREE_DEPTH, 1, 32)
    made = width + (depth - 1) * width**2
    most = min(made, max_tokens - 1)
    num_drafts = _integer(values, "num_drafts", min(_TREE_DRAFTS, most), 1, max_tokens - 1)
    if num_drafts > made:
        raise ConfigError(
            f"{values['num_drafts'].flag} is {num_drafts}, but trees of {depth} steps and top-k {width} have {made} "
            "guesses."
        )
    return num_drafts, width, min(depth, num_drafts)


def make_speculation(settings: SpeculativeSettings | None, buckets: Buckets, proposer: Proposer) -> Speculation:
    """What decides how many drafts are verified."""
    if settings is None:
        return NoSpeculation()
    lookahead, max_depth = proposer.lookahead, proposer.max_depth if proposer.is_tree else None
    if not settings.adaptive:
        return FixedSpeculation(settings.num_drafts, lookahead, max_depth)
    return AdaptiveSpeculation(
        settings.num_drafts,
        pad=lambda tokens, rows: buckets.pick(tokens, rows, has_prefill=False).tokens,
        max_tokens=buckets.max_places,
        lookahead=lookahead,
        max_depth=max_depth,
    )


def _merge(config: SpeculativeConfig) -> dict[str, _Value]:
    """All that was set, by one name each."""
    sources = (
        ("model", "--speculative-model", config.speculative_model),
        ("model", "--spec-model", config.spec_model),
        ("method", "--spec-method", config.spec_method),
        ("num_drafts", "--num-speculative-tokens", config.num_speculative_tokens),
        ("num_drafts", "--spec-tokens", config.spec_tokens),
        ("longest", "--ngram-prompt-lookup-max", config.ngram_prompt_lookup_max),
        ("shortest", "--ngram-prompt-lookup-min", config.ngram_prompt_lookup_min),
        ("width", "--speculative-eagle-topk", config.speculative_eagle_topk),
        ("depth", "--speculative-num-steps", config.speculative_num_steps),
        ("corpus_size", "--speculative-corpus-size", config.speculative_corpus_size),
        ("acceptance", "--spec-decoding-acceptance-method", config.spec_decoding_acceptance_method),
        (
            "threshold",
            "--typical-acceptance-sampler-posterior-threshold",
            config.typical_acceptance_sampler_posterior_threshold,
        ),
        ("alpha", "--typical-acceptance-sampler-posterior-alpha", config.typical_acceptance_sampler_posterior_alpha),
        *_read_json(config.speculative_config),
    )
    merged: dict[str, _Value] = {}
    for name, flag, value in sources:
        if value is None:
            continue
        earlier = merged.setdefault(name, _Value(value, flag))
        if earlier.value != value:
            raise ConfigError(f"{earlier.flag} is {earlier.value!r}, but {flag} is {value!r}: give one of them.")
    return merged


_JSON_NAMES = {
    "model": "model",
    "method": "method",
    "num_speculative_tokens": "num_drafts",
    "prompt_lookup_max": "longest",
    "prompt_lookup_min": "shortest",
    "eagle_topk": "width",
    "num_steps": "depth",
    "corpus_size": "corpus_size",
    "acceptance_method": "acceptance",
    "posterior_threshold": "threshold",
    "posterior_alpha": "alpha",
}


def _read_json(given: str | None) -> list[tuple[str, str, Any]]:
    """The entries of --speculative-config under our names."""
    if given is None:
        return []
    try:
        entries = json.loads(given)
    except ValueError as error:
        raise ConfigError(f"--speculative-config is no JSON: {error}.") from None
    if not isinstance(entries, Mapping):
        raise ConfigError(f"--speculative-config must be a JSON object, got {given}.")
    found = []
    for key, value in entries.items():
        if key not in _JSON_NAMES:
            hint = nearest(key, _JSON_NAMES) or f" It knows {', '.join(_JSON_NAMES)}."
            raise ConfigError(f"--speculative-config: unknown key {key!r}.{hint}")
        found.append((_JSON_NAMES[key], f"{key!r} of --speculative-config", value))
    return found


def _method(values: Mapping[str, _Value]) -> tuple[str | None, str | None]:
    """The method, which is named or told by the model, and the draft model or heads if they are named."""
    named, model = values.get("method"), values.get("model")
    for given in (named, model):
        if given is not None and (not isinstance(given.value, str) or not given.value):
            raise ConfigError(f"{given.flag} must be a text, got {given.value!r}.")
    keyword = None if model is None else model.value.strip("[]")
    keyword = keyword and _OTHER_NAMES.get(keyword, keyword)
    if keyword not in _DEFAULT_DRAFTS or keyword == "draft_model":
        keyword = None
    if named is None and model is None:
        return None, None
    method = str(named.value) if named else keyword or "draft_model"
    method = _OTHER_NAMES.get(method, method)
    if named and method not in _DEFAULT_DRAFTS:
        raise ConfigError(f"{named.flag} must be one of {', '.join(_DEFAULT_DRAFTS)}, got {method!r}.")
    if method == "draft_model":
        if model is None or keyword:
            raise ConfigError("the method draft_model needs a model: set --speculative-model (or --spec-model).")
        return method, model.value
    if method in _TRAINED:
        return method, None if model is None or keyword == method else model.value
    if model is not None and keyword != method:
        raise ConfigError(f"{model.flag} is {model.value!r}, but the method {method} has no model: leave it out.")
    return method, None


def _share(values: Mapping[str, _Value], name: str, default: float) -> float:
    if name not in values:
        return default
    value, flag = values[name].value, values[name].flag
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ConfigError(f"{flag} must be a number above 0, at most 1, got {value!r}.")
    return float(value)


def _integer(values: Mapping[str, _Value], name: str, default: int, low: int, high: int) -> int:
    if name not in values:
        return default
    value, flag = values[name].value, values[name].flag
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{flag} must be an integer from {low} to {high}, got {value!r}.")
    return value
