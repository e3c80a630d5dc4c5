"""Llama, and the models that are Llama under another name (SmolLM, SmolLM2, TinyLlama, …)."""

from __future__ import annotations

from typing import Any

from jaxserve.models.family import Family, attention_bias
from jaxserve.models.fields import Fields

__all__ = ["FAMILY"]


def _quirks(fields: Fields, num_layers: int) -> dict[str, Any]:
    return {**attention_bias(fields), "mlp_bias": fields.flag("mlp_bias")}


FAMILY = Family(name="llama", architectures=("LlamaForCausalLM",), gguf_arch="llama", interleaved=True, quirks=_quirks)
