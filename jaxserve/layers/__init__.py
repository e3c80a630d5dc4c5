"""Pure functions that a decoder is made of. Arrays in, arrays out; no state, no configuration objects of the engine."""

from jaxserve.layers.attention import attention
from jaxserve.layers.embed import embed, unembed
from jaxserve.layers.kv_cache import KVCache, KVLayer
from jaxserve.layers.linear import linear
from jaxserve.layers.mlp import gated_mlp
from jaxserve.layers.rope import apply_rope, rope_table

__all__ = [
    "KVCache",
    "KVLayer",
    "apply_rope",
    "attention",
    "embed",
    "gated_mlp",
    "linear",
    "rope_table",
    "unembed",
]
