"""Qwen2 and Qwen2.5: a bias on q, k and v; a sliding window on the upper layers if it is switched on."""

from __future__ import annotations

from typing import Any

from jaxserve.models.family import Family, layer_windows
from jaxserve.models.fields import Fields

__all__ = ["FAMILY", "upper_windows"]


def upper_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Windows from layer ``max_window_layers`` upwards, if ``use_sliding_window`` is set (Qwen3 does the same)."""
    first = fields.integer("max_window_layers", least=0)
    return layer_windows(fields, num_layers, lambda i: i >= first, enabled=fields.flag("use_sliding_window"))


def _quirks(fields: Fields, num_layers: int) -> dict[str, Any]:
    return {"qkv_bias": True, "windows": upper_windows(fields, num_layers)}


FAMILY = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    gguf_arch="qwen2",
    defaults={"sliding_window": 4096, "max_window_layers": 28},
    quirks=_quirks,
)
