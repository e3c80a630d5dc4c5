"""Which family serves an architecture, and which parameters a model has."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from jaxserve.errors import UnsupportedModelError
from jaxserve.models import llama, mistral, qwen2, qwen3, smollm3
from jaxserve.models.config import ModelConfig
from jaxserve.models.family import Family
from jaxserve.models.names import GGUF_NAMES, HF_NAMES
from jaxserve.models.params import ParamTree, param_tree

__all__ = ["FAMILIES", "family_of_architectures", "family_of_gguf", "param_specs"]

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {m.FAMILY.name: m.FAMILY for m in (llama, mistral, qwen2, qwen3, smollm3)}
)

_BY_ARCHITECTURE: dict[str, Family] = {name: family for family in FAMILIES.values() for name in family.architectures}
_BY_GGUF: dict[str, Family] = {family.gguf_arch: family for family in FAMILIES.values() if family.gguf_arch}


def family_of_architectures(names: Any) -> Family:
    """The family of the first served name in ``architectures`` of config.json; raises UnsupportedModelError."""
    listed = [str(name) for name in names] if isinstance(names, list) else []
    for name in listed:
        if name in _BY_ARCHITECTURE:
            return _BY_ARCHITECTURE[name]
    given = ", ".join(listed) or "none"
    raise UnsupportedModelError(
        f"The model's architecture ({given}) is not served. Served are: {', '.join(sorted(_BY_ARCHITECTURE))}."
    )


def family_of_gguf(arch: Any) -> Family:
    """The family of a GGUF file's ``general.architecture``; raises UnsupportedModelError."""
    family = _BY_GGUF.get(str(arch))
    if family is not None:
        return family
    raise UnsupportedModelError(
        f"The GGUF architecture {arch!r} is not served. Served are: {', '.join(sorted(_BY_GGUF))}."
    )


def param_specs(cfg: ModelConfig, source: Literal["hf", "gguf"]) -> ParamTree:
    """The tree of ParamSpec that the decoder consumes, with its values' names in a checkpoint of kind ``source``."""
    if source == "gguf":
        return param_tree(cfg, GGUF_NAMES, interleaved=FAMILIES[cfg.family].interleaved)
    return param_tree(cfg, HF_NAMES)
