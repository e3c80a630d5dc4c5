"""Qwen3 (dense): RMSNorm on each head of q and k, a head size of its own, no bias unless asked for."""

from __future__ import annotations

from typing import Any

from jaxserve.models.family import Family, attention_bias
from jaxserve.models.fields import Fields
from jaxserve.models.qwen2 import upper_windows

__all__ = ["FAMILY"]


def _quirks(fields: Fields, num_layers: int) -> dict[str, Any]:
    return {**attention_bias(fields), "windows": upper_windows(fields, num_layers)}


FAMILY = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    gguf_arch="qwen3",
    qk_norm=True,
    defaults={"sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
    quirks=_quirks,
)
