"""``adapter_config.json``: what PEFT says of an adapter, and what is refused as it would change more than products.

Fields and rules are those of PEFT's ``LoraConfig`` (https://huggingface.co/docs/peft/package_reference/lora). Its
``fan_in_fan_out`` says how the *base* weight is stored, which is no matter here: the factors are the same either way.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.errors import CorruptFileError, UnsupportedModelError
from jaxserve.weights.reader import read_json

__all__ = ["CONFIG", "PeftSettings", "read_settings"]

CONFIG = "adapter_config.json"

_REFUSED = {
    "use_dora": "is a DoRA adapter (use_dora), which rescales whole columns of the base weights",
    "modules_to_save": "replaces whole modules of the base model (modules_to_save)",
    "trainable_token_indices": "replaces embeddings of single tokens (trainable_token_indices)",
    "layer_replication": "repeats layers of the base model (layer_replication)",
    "target_parameters": "changes parameters that are no projections (target_parameters)",
    "alora_invocation_tokens": "is switched on by tokens of the prompt (alora_invocation_tokens)",
    "arrow_config": "routes between adapters (arrow_config)",
    "lora_bias": "has a bias beside its factors (lora_bias)",
    "ensure_weight_tying": "changes embedding and output head as one (ensure_weight_tying)",
}
"""What makes an adapter something else than factors, if it is set."""

_HARMLESS = ("use_rslora", "megatron_config", "eva_config", "corda_config", "loftq_config", "lora_ga_config")
"""Switches and settings that are served, or tell how training began, which ``init_lora_weights`` tells as well."""

_HARMLESS_INIT = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
"""Ways of starting that leave the base model as it is; PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA change it."""


@dataclass(frozen=True)
class PeftSettings:
    """Sizes and scales of an adapter's factors.

    Attributes:
        path: the file, for messages.
        rank, alpha: for projections that no pattern names.
        rank_pattern, alpha_pattern: for those whose path ends in a match.
        rslora: scales are alpha / sqrt(rank) (arXiv:2312.03732), not alpha / rank.
        base_model: for which model it was made, as its trainer named it.
    """

    path: Path
    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    rslora: bool
    base_model: str | None

    def rank_of(self, module: str) -> int:
        """The rank that the settings give to a module, by its path in the model."""
        return int(_matching(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        """What products with the factors of a module are multiplied with."""
        alpha, rank = float(_matching(self.alpha_pattern, module, self.alpha)), self.rank_of(module)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank


def read_settings(folder: Path) -> PeftSettings:
    """The settings of an adapter's folder.

    Raises:
        MissingFileError, CorruptFileError: they are not there, or not what PEFT writes.
        UnsupportedModelError: the adapter is of a kind that is not served; the message says why.
    """
    path = folder / CONFIG
    config = read_json(path)
    _refuse(config, path)
    rank_pattern = _pattern(config, "rank_pattern", path)
    return PeftSettings(
        path=path,
        rank=int(_number(config.get("r"), "r", path, whole=True)),
        alpha=_number(config.get("lora_alpha"), "lora_alpha", path),
        rank_pattern={
            key: int(_number(value, f"rank_pattern[{key!r}]", path, whole=True)) for key, value in rank_pattern.items()
        },
        alpha_pattern={
            key: _number(value, f"alpha_pattern[{key!r}]", path)
            for key, value in _pattern(config, "alpha_pattern", path).items()
        },
        rslora=bool(config.get("use_rslora")),
        base_model=config.get("base_model_name_or_path") or None,
    )


def _refuse(config: Mapping[str, Any], path: Path) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UnsupportedModelError(f"{path}: peft_type must be LORA, got {kind!r}.")
    for key, why in _REFUSED.items():
        if config.get(key):
            raise UnsupportedModelError(f"{path}: the adapter {why}; served are plain LoRA factors.")
    variants = (key for key in config if key.startswith("use_") or key.endswith("_config"))
    unknown = sorted(key for key in variants if config[key] and key not in _HARMLESS)
    if unknown:
        raise UnsupportedModelError(f"{path}: {unknown[0]} is not supported; served are plain LoRA factors.")
    if config.get("bias", "none") != "none":
        raise UnsupportedModelError(f"{path}: bias must be 'none', got {config['bias']!r}: biases are not replaced.")
    start = config.get("init_lora_weights")
    if not any(start is known or (isinstance(start, str) and start == known) for known in _HARMLESS_INIT):
        raise UnsupportedModelError(
            f"{path}: init_lora_weights is {start!r}, which takes the adapter's start out of the base weights: save it "
            "with PEFT's path_initial_model_for_weight_conversion, which makes a plain adapter of it."
        )


def _pattern(config: Mapping[str, Any], name: str, path: Path) -> Mapping[str, Any]:
    pattern = config.get(name) or {}
    if not isinstance(pattern, dict):
        raise CorruptFileError(f"{path}: {name} must map names of modules to numbers, got {pattern!r}.")
    for key in pattern:
        try:
            re.compile(_ending(key))
        except re.error as error:
            raise CorruptFileError(f"{path}: {name} has the key {key!r}, which is no pattern: {error}.") from None
    return pattern


def _number(value: Any, name: str, path: Path, *, whole: bool = False) -> float:
    try:
        legal = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        legal = False
    if not legal or (whole and (value != int(value) or value < 1)):
        raise CorruptFileError(f"{path}: {name} must be a {'positive integer' if whole else 'number'}, got {value!r}.")
    return float(value)


def _matching(pattern: Mapping[str, Any], module: str, default: float) -> Any:
    """The value of the first key that the module's path ends in, at a dot, as PEFT looks it up."""
    return next((value for key, value in pattern.items() if re.match(_ending(key), module)), default)


def _ending(key: str) -> str:
    return rf"(.*\.)?({key})$"
