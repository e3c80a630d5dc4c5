"""Tiny checkpoints: random models saved by transformers, and GGUF files written by the gguf package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from jaxserve.models import ParamSpec, Transform

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "llama-biased": (LlamaConfig, {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral": (MistralConfig, {"sliding_window": 8}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "smollm3": (SmolLM3Config, {}),
}


def tiny_model(kind: str, dtype: torch.dtype = torch.float32, **more: Any) -> PreTrainedModel:
    """A random model with every value its own, biases and norms too; ``more`` has other settings of transformers."""
    config_class, changes = KINDS[kind]
    sizes = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
    }
    config = config_class(**{**sizes, **changes, **more})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model.to(dtype)


def as_numpy(tensor: torch.Tensor) -> NDArray[np.float32]:
    return tensor.detach().float().numpy()


def expected(spec: ParamSpec, state: dict[str, torch.Tensor]) -> NDArray[np.float32]:
    """What a parameter must hold, from a torch state dict with the Hugging Face names."""
    parts = [as_numpy(state[s.name]) for s in spec.sources]
    transposed = spec.sources[0].transform is Transform.TRANSPOSE
    return np.concatenate([p.T if transposed else p for p in parts], axis=-1)


GGUF_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """GGUF's name for a Hugging Face tensor."""
    fixed = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in fixed or name == "lm_head.weight":
        return fixed.get(name, "output.weight")
    layer, part = name.removeprefix("model.layers.").split(".", 1)
    module, kind = part.rsplit(".", 1)
    return f"blk.{layer}.{GGUF_PARTS[module]}.{kind}"


def interleave(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Reorder the rows of each head from half-split to interleaved RoPE, one row at a time."""
    head_dim = rows.shape[0] // heads
    order = [
        h * head_dim + half * head_dim // 2 + i for h in range(heads) for i in range(head_dim // 2) for half in (0, 1)
    ]
    return rows[order]


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    arch: str,
    extra: dict[str, NDArray[np.float32]] | None = None,
    kind_of: Callable[[str], str] = lambda name: "F32",
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write a model as a GGUF file, as llama.cpp's converter lays it out.

    Args:
        path, model, arch: what to write, and where.
        extra: more tensors.
        kind_of: GGUF's name of a matrix -> the kind that it is stored in.
        metadata: more keys and values.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        value = as_numpy(tensor)
        if arch in ("llama", "smollm3") and "q_proj" in name:
            value = interleave(value, config.num_attention_heads)
        if arch in ("llama", "smollm3") and "k_proj" in name:
            value = interleave(value, config.num_key_value_heads)
        kind = gguf.GGMLQuantizationType[kind_of(gguf_name(name)) if value.ndim == 2 else "F32"]
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(value, kind), raw_dtype=kind)
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    for key, found in (metadata or {}).items():
        add = {str: writer.add_string, int: writer.add_uint32, list: writer.add_array}[type(found)]
        add(key, found)
    finish(writer)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
