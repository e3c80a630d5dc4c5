"""What checkpoints call the tensors that all families have.

Names stand without ``.weight`` and ``.bias``; ``{i}`` is the layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["GGUF_NAMES", "HF_NAMES"]

HF_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "embed": "model.embed_tokens",
        "final_norm": "model.norm",
        "lm_head": "lm_head",
        "input_norm": "model.layers.{i}.input_layernorm",
        "q": "model.layers.{i}.self_attn.q_proj",
        "k": "model.layers.{i}.self_attn.k_proj",
        "v": "model.layers.{i}.self_attn.v_proj",
        "o": "model.layers.{i}.self_attn.o_proj",
        "q_norm": "model.layers.{i}.self_attn.q_norm",
        "k_norm": "model.layers.{i}.self_attn.k_norm",
        "post_norm": "model.layers.{i}.post_attention_layernorm",
        "gate": "model.layers.{i}.mlp.gate_proj",
        "up": "model.layers.{i}.mlp.up_proj",
        "down": "model.layers.{i}.mlp.down_proj",
    }
)

GGUF_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "embed": "token_embd",
        "final_norm": "output_norm",
        "lm_head": "output",
        "input_norm": "blk.{i}.attn_norm",
        "q": "blk.{i}.attn_q",
        "k": "blk.{i}.attn_k",
        "v": "blk.{i}.attn_v",
        "o": "blk.{i}.attn_output",
        "q_norm": "blk.{i}.attn_q_norm",
        "k_norm": "blk.{i}.attn_k_norm",
        "post_norm": "blk.{i}.ffn_norm",
        "gate": "blk.{i}.ffn_gate",
        "up": "blk.{i}.ffn_up",
        "down": "blk.{i}.ffn_down",
    }
)
