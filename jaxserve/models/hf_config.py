"""ModelConfig from a Hugging Face config.json.

transformers 5 keeps everything about RoPE in ``rope_parameters``; older files have ``rope_theta`` beside a
``rope_scaling`` whose kind is called ``rope_type`` or, older still, ``type``. Both are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.errors import UnsupportedModelError
from jaxserve.models.config import ModelConfig, RopeScaling
from jaxserve.models.fields import Fields
from jaxserve.models.registry import family_of_architectures

__all__ = ["from_hf"]

_ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
_DTYPES = ("float32", "bfloat16", "float16")


def from_hf(config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelConfig:
    """Make a ModelConfig from the parsed config.json and generation_config.json.

    Raises:
        UnsupportedModelError: the architecture, activation, quantisation or kind of RoPE is not served.
        CorruptFileError: a key is missing or has a wrong value; the message names it.
    """
    family = family_of_architectures(config.get("architectures"))
    fields = Fields(config, "config.json", family.defaults)
    _refuse_unserved(fields)
    num_layers = fields.num_layers("num_hidden_layers")
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise fields.wrong("num_attention_heads", f"a multiple of num_key_value_heads ({num_kv_heads})", num_heads)
    head_dim = fields.integer("head_dim", default=hidden_size // num_heads)
    if head_dim % 2:
        raise fields.wrong("head_dim", "even, for RoPE", head_dim)
    max_position = fields.integer("max_position_embeddings")
    theta, scaling = _rope(fields, max_position)
    generation = Fields(generation_config or {}, "generation_config.json")
    eos = {*fields.token_ids("eos_token_id"), *generation.token_ids("eos_token_id")}
    bos = fields.token_ids("bos_token_id")
    dtype = fields.get("dtype", fields.get("torch_dtype"))
    values: dict[str, Any] = {
        "windows": (None,) * num_layers,
        "rope_layers": (True,) * num_layers,
        **family.quirks(fields, num_layers),
    }
    return ModelConfig(
        family=family.name,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=scaling.reach(max_position) if scaling else max_position,
        rms_eps=fields.number("rms_norm_eps", default=1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=fields.flag("tie_word_embeddings"),
        qk_norm=family.qk_norm,
        eos_token_ids=tuple(sorted(eos)),
        bos_token_id=bos[0] if bos else None,
        checkpoint_dtype=dtype if dtype in _DTYPES else "float32",
        **values,
    )


def _refuse_unserved(fields: Fields) -> None:
    quantization = fields.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unnamed") if isinstance(quantization, dict) else quantization
        raise UnsupportedModelError(
            f"The checkpoint is quantised with {method}, which is not read. Read are: GGUF files, and safetensors in "
            "float32, bfloat16 or float16."
        )
    act = fields.get("hidden_act", "silu")
    if act != "silu":
        raise UnsupportedModelError(f"hidden_act {act!r} is not served. Served is: silu.")


def _rope(fields: Fields, max_position: int) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) out of config.json; the precedence among the old and new keys is that of transformers."""
    params = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if not isinstance(params, Mapping):
        raise fields.wrong("rope_parameters", "an object", params)
    if any(isinstance(value, Mapping) for value in params.values()):
        raise UnsupportedModelError("rope_parameters that differ by layer type are not served.")
    rope = Fields(params, f"{fields.where} (RoPE parameters)")
    partial = rope.get("partial_rotary_factor", fields.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise UnsupportedModelError(f"partial_rotary_factor {partial!r} is not served. Served is: 1.0.")
    theta = rope.number("rope_theta", default=fields.number("rope_theta", default=10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _ROPE_KINDS:
        raise UnsupportedModelError(f"The RoPE type {kind!r} is not served. Served are: {', '.join(_ROPE_KINDS)}.")
    return theta, None if kind == "default" else _scaling(kind, rope, fields, max_position)


def _scaling(kind: str, rope: Fields, fields: Fields, max_position: int) -> RopeScaling:
    original = rope.integer("original_max_position_embeddings", default=max_position)
    original = fields.integer("original_max_position_embeddings", default=original)
    if kind == "llama3":
        return RopeScaling(
            kind,
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_max_position=original,
        )
    if kind == "yarn":

        def optional(key: str) -> float | None:
            return None if rope.get(key) is None else rope.number(key)

        return RopeScaling(
            kind,
            factor=rope.number("factor", default=max_position / original),
            original_max_position=original,
            beta_fast=rope.number("beta_fast", default=32.0),
            beta_slow=rope.number("beta_slow", default=1.0),
            truncate=rope.get("truncate", True) is not False,
            attention_factor=optional("attention_factor"),
            mscale=optional("mscale"),
            mscale_all_dim=optional("mscale_all_dim"),
        )
    # linear and dynamic count from the longest position of the model, whatever else the file says.
    return RopeScaling(kind, factor=rope.number("factor"), original_max_position=max_position)
