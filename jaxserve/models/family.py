"""What sets one model family apart from Llama, as data.

All families served here are the same decoder: RMSNorm, grouped-query attention, gated MLP. A family states the
architecture names it answers to, what transformers assumes where config.json is silent, and a function for the settings
that only it has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxserve.models.fields import Fields

__all__ = ["Family", "attention_bias", "layer_windows"]

Quirks = Callable[[Fields, int], dict[str, Any]]


def _none(fields: Fields, num_layers: int) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class Family:
    """One model family.

    Attributes:
        name: its key in the registry.
        architectures: class names in the ``architectures`` of config.json.
        gguf_arch: ``general.architecture`` of its GGUF files; None where they pass for another family's.
        interleaved: its GGUF files hold the rows of q and k in the order of interleaved RoPE.
        qk_norm: RMSNorm over each head of q and k.
        nope_interval: every how many layers one goes without RoPE, 0 for never.
        defaults: what transformers assumes for keys that config.json leaves out.
        quirks: (config.json, number of layers) -> fields of ModelConfig that only this family sets.
    """

    name: str
    architectures: tuple[str, ...]
    gguf_arch: str | None = None
    interleaved: bool = False
    qk_norm: bool = False
    nope_interval: int = 0
    defaults: Mapping[str, Any] = field(default_factory=dict)
    quirks: Quirks = _none


def attention_bias(fields: Fields) -> dict[str, Any]:
    """``attention_bias``, which puts a bias on all four projections of attention."""
    bias = fields.flag("attention_bias")
    return {"qkv_bias": bias, "o_bias": bias}


def layer_windows(
    fields: Fields, num_layers: int, slides: Callable[[int], bool], enabled: bool
) -> tuple[int | None, ...]:
    """Sliding window of each layer.

    Args:
        fields: config.json; its ``layer_types`` rule where they are given.
        num_layers: L.
        slides: layer -> whether it slides where there are no ``layer_types``.
        enabled: whether any layer may slide.
    """
    types = fields.get("layer_types")
    known = ("full_attention", "sliding_attention")
    if types is not None and (
        not isinstance(types, list) or len(types) != num_layers or any(t not in known for t in types)
    ):
        raise fields.wrong("layer_types", f"a list of {num_layers} names out of {', '.join(known)}", types)
    if not enabled or fields.get("sliding_window") is None:
        return (None,) * num_layers
    window = fields.integer("sliding_window")
    sliding = [types[i] == "sliding_attention" if types else slides(i) for i in range(num_layers)]
    return tuple(window if s else None for s in sliding)
