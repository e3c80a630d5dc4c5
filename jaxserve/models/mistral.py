"""Mistral: Llama with a sliding window on every layer. Its GGUF files call themselves llama."""

from __future__ import annotations

from typing import Any

from jaxserve.models.family import Family
from jaxserve.models.fields import Fields

__all__ = ["FAMILY"]


def _quirks(fields: Fields, num_layers: int) -> dict[str, Any]:
    # transformers slides all layers alike, whatever layer_types say. null is how v0.2 and later say "no window".
    window = None if fields.get("sliding_window") is None else fields.integer("sliding_window")
    return {"windows": (window,) * num_layers}


FAMILY = Family(
    name="mistral",
    architectures=("MistralForCausalLM",),
    interleaved=True,
    defaults={"sliding_window": 4096},
    quirks=_quirks,
)
