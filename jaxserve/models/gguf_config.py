"""ModelConfig from the metadata and the tensor list of a GGUF file.

What a GGUF file does not write down it shows: an untied head, biases and the size of the vocabulary are read off the
tensors that are there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.errors import CorruptFileError, UnsupportedModelError
from jaxserve.models.config import ModelConfig, RopeScaling
from jaxserve.models.family import Family
from jaxserve.models.fields import Fields
from jaxserve.models.names import GGUF_NAMES
from jaxserve.models.registry import family_of_gguf

__all__ = ["ROPE_FACTORS", "from_gguf"]

ROPE_FACTORS = "rope_freqs.weight"
"""Tensor of D/2 divisors of the RoPE frequencies; converters write llama3 scaling this way."""

_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# llama.cpp and transformers do not agree on what these mean; to guess would bend every long context silently.
_YARN_REFUSED = ("attn_factor", "yarn_attn_factor", "yarn_ext_factor", "yarn_log_multiplier")


def from_gguf(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    rope_factors: Sequence[float] | None = None,
    checkpoint_dtype: str = "float32",
) -> ModelConfig:
    """Make a ModelConfig from a GGUF file.

    Args:
        metadata: its key-value pairs.
        shapes: tensor name -> shape, rows first.
        rope_factors: values of the tensor ``rope_freqs.weight``, if there is one.
        checkpoint_dtype: the dtype that holds the weights best (see ModelConfig).

    Raises:
        UnsupportedModelError: the architecture, a mixture of experts or the kind of RoPE is not served.
        CorruptFileError: a key or tensor is missing or wrong; the message names it.
    """
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise UnsupportedModelError(f"The GGUF file holds a {kind}, not a model.")
    arch = metadata.get("general.architecture")
    family = family_of_gguf(arch)
    fields = Fields(metadata, "GGUF metadata", prefix=f"{arch}.")
    if fields.integer("expert_count", default=0, least=0):
        raise UnsupportedModelError(f"A mixture of experts ({arch}.expert_count) is not served in GGUF form.")
    heads = _heads(fields)
    num_layers = fields.num_layers("block_count")
    embed = shapes.get("token_embd.weight", ())
    if len(embed) != 2:
        raise CorruptFileError("The GGUF file has no two-dimensional tensor token_embd.weight.")
    max_position = fields.integer("context_length")
    scaling = _scaling(fields, heads["head_dim"], rope_factors)
    tokens = Fields(metadata, "GGUF metadata", prefix="tokenizer.ggml.")
    bos = tokens.token_ids("bos_token_id")
    first = {name: GGUF_NAMES[name].format(i=0) for name in ("q", "o", "gate")}
    return ModelConfig(
        family=family.name,
        vocab_size=embed[0],
        hidden_size=fields.integer("embedding_length"),
        intermediate_size=fields.integer("feed_forward_length"),
        num_layers=num_layers,
        **heads,
        max_position=scaling.reach(max_position) if scaling else max_position,
        rms_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope_theta=fields.number("rope.freq_base", default=10000.0),
        rope_scaling=scaling,
        tie_embeddings=f"{GGUF_NAMES['lm_head']}.weight" not in shapes,
        qkv_bias=f"{first['q']}.bias" in shapes,
        o_bias=f"{first['o']}.bias" in shapes,
        mlp_bias=f"{first['gate']}.bias" in shapes,
        qk_norm=family.qk_norm,
        windows=(_window(fields),) * num_layers,
        rope_layers=_rope_layers(family, num_layers),
        eos_token_ids=tuple(sorted({i for key in _EOS_KEYS for i in tokens.token_ids(key)})),
        bos_token_id=bos[0] if bos else None,
        checkpoint_dtype=checkpoint_dtype,
    )


def _heads(fields: Fields) -> dict[str, int]:
    num_heads = fields.integer("attention.head_count")
    num_kv_heads = fields.integer("attention.head_count_kv", default=num_heads)
    if num_heads % num_kv_heads:
        raise fields.wrong("attention.head_count", f"a multiple of head_count_kv ({num_kv_heads})", num_heads)
    head_dim = fields.integer("attention.key_length", default=fields.integer("embedding_length") // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(key, default=head_dim) != head_dim:
            raise UnsupportedModelError(
                f"A {key} ({fields.get(key)}) other than the head size ({head_dim}) is not served."
            )
    return {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}


def _window(fields: Fields) -> int | None:
    if fields.get("attention.sliding_window_pattern") is not None:
        raise UnsupportedModelError("Sliding windows that differ by layer are not served in GGUF form.")
    return fields.integer("attention.sliding_window", default=0, least=0) or None


def _rope_layers(family: Family, num_layers: int) -> tuple[bool, ...]:
    interval = family.nope_interval
    return tuple(not interval or (i + 1) % interval != 0 for i in range(num_layers))


def _scaling(fields: Fields, head_dim: int, factors: Sequence[float] | None) -> RopeScaling | None:
    kind = fields.get("rope.scaling.type", "none")
    old = fields.get("rope.scale_linear")
    if kind == "none" and old is not None:
        return RopeScaling("linear", factor=fields.number("rope.scale_linear"))
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(
            f"The RoPE type {kind!r} is not served in GGUF form. Served are: none, linear, yarn."
        )
    if factors is not None:
        if kind != "none":
            raise UnsupportedModelError(f"{ROPE_FACTORS} beside RoPE scaling of type {kind} is not served.")
        if len(factors) != head_dim // 2 or not all(0 < f < float("inf") for f in factors):
            raise CorruptFileError(f"{ROPE_FACTORS} must hold {head_dim // 2} positive numbers.")
        return RopeScaling("factors", factors=tuple(factors))
    if kind == "none":
        return None
    if kind == "linear":
        return RopeScaling("linear", factor=fields.number("rope.scaling.factor"))
    for key in _YARN_REFUSED:
        if fields.get(f"rope.scaling.{key}") is not None:
            raise UnsupportedModelError(f"YaRN with rope.scaling.{key} is not served in GGUF form.")
    return RopeScaling(
        "yarn",
        factor=fields.number("rope.scaling.factor"),
        original_max_position=fields.integer("rope.scaling.original_context_length"),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", default=32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", default=1.0),
    )
