"""SmolLM3: no RoPE on every fourth layer; where windows are switched on, those layers are the ones that slide."""

from __future__ import annotations

from typing import Any

from jaxserve.models.family import Family, attention_bias, layer_windows
from jaxserve.models.fields import Fields

__all__ = ["FAMILY"]

_INTERVAL = 4


def _quirks(fields: Fields, num_layers: int) -> dict[str, Any]:
    uses_rope = fields.get("no_rope_layers")  # despite the name, 1 is a layer with RoPE
    if uses_rope is None:
        interval = fields.integer("no_rope_layer_interval")
        uses_rope = [int((i + 1) % interval != 0) for i in range(num_layers)]
    if not isinstance(uses_rope, list) or len(uses_rope) < num_layers or any(r not in (0, 1) for r in uses_rope):
        raise fields.wrong("no_rope_layers", f"a list of at least {num_layers} zeros and ones", uses_rope)
    rope_layers = tuple(bool(r) for r in uses_rope[:num_layers])
    return {
        **attention_bias(fields),
        "mlp_bias": fields.flag("mlp_bias"),
        "rope_layers": rope_layers,
        "windows": layer_windows(
            fields, num_layers, lambda i: not rope_layers[i], enabled=fields.flag("use_sliding_window")
        ),
    }


FAMILY = Family(
    name="smollm3",
    architectures=("SmolLM3ForCausalLM",),
    gguf_arch="smollm3",
    interleaved=True,
    nope_interval=_INTERVAL,
    defaults={"no_rope_layer_interval": _INTERVAL, "rope_theta": 2000000.0, "tie_word_embeddings": True},
    quirks=_quirks,
)
