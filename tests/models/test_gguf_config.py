"""ModelConfig from GGUF metadata and the tensors that are there."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.errors import CorruptFileError, UnsupportedModelError
from jaxserve.models import RopeScaling, from_gguf

EMBED = {"token_embd.weight": (96, 32)}


def metadata(arch: str = "llama", **changes: Any) -> dict[str, Any]:
    """Metadata of a small model; a key given as None is left out."""
    keys = {
        "block_count": 4,
        "context_length": 128,
        "embedding_length": 32,
        "feed_forward_length": 48,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        **changes,
    }
    return {"general.architecture": arch, **{f"{arch}.{k}": v for k, v in keys.items() if v is not None}}


def test_llama() -> None:
    tokens = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 7}
    config = from_gguf({**metadata(**{"rope.freq_base": 5000.0}), **tokens}, EMBED, checkpoint_dtype="bfloat16")
    assert (config.family, config.vocab_size, config.num_layers, config.head_dim) == ("llama", 96, 4, 8)
    assert config.tie_embeddings
    assert config.rope_theta == 5000.0
    assert config.eos_token_ids == (2, 7)
    assert config.bos_token_id == 1
    assert config.checkpoint_dtype == "bfloat16"
    assert config.windows == (None,) * 4
    hash(config)


def test_tensors_tell_of_head_and_biases() -> None:
    shapes = {**EMBED, "output.weight": (96, 32), "blk.0.attn_q.bias": (32,)}
    config = from_gguf(metadata("qwen2"), shapes)
    assert not config.tie_embeddings
    assert config.qkv_bias
    assert not config.o_bias
    assert not config.mlp_bias


def test_qwen3_has_norms_and_its_own_head_size() -> None:
    config = from_gguf(metadata("qwen3", **{"attention.key_length": 16, "attention.value_length": 16}), EMBED)
    assert config.qk_norm
    assert config.head_dim == 16


def test_smollm3_leaves_rope_out_of_every_fourth_layer() -> None:
    assert from_gguf(metadata("smollm3"), EMBED).rope_layers == (True, True, True, False)
    assert from_gguf(metadata("llama"), EMBED).rope_layers == (True,) * 4


def test_window_of_all_layers() -> None:
    assert from_gguf(metadata(**{"attention.sliding_window": 8}), EMBED).windows == (8,) * 4


def test_rope_factors_become_a_scaling() -> None:
    config = from_gguf(metadata(), EMBED, rope_factors=[1.0, 1.0, 4.0, 8.0])
    assert config.rope_scaling == RopeScaling("factors", factors=(1.0, 1.0, 4.0, 8.0))


@pytest.mark.parametrize("factors", [[1.0], [1.0, 1.0, 0.0, 1.0], [1.0, 1.0, 1.0, float("nan")]])
def test_unusable_rope_factors(factors: list[float]) -> None:
    with pytest.raises(CorruptFileError, match="rope_freqs"):
        from_gguf(metadata(), EMBED, rope_factors=factors)


def test_linear_and_yarn_scaling() -> None:
    linear = metadata(**{"rope.scaling.type": "linear", "rope.scaling.factor": 2.0})
    assert from_gguf(linear, EMBED).rope_scaling == RopeScaling("linear", factor=2.0)
    assert from_gguf(metadata(**{"rope.scale_linear": 2.0}), EMBED).rope_scaling == RopeScaling("linear", factor=2.0)
    keys = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128}
    config = from_gguf(metadata("qwen2", **keys), EMBED)
    assert config.rope_scaling == RopeScaling("yarn", 4.0, original_max_position=128)
    assert config.max_position == 512


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"general.architecture": "mamba"}, ["mamba", "llama", "qwen3"]),
        ({"general.architecture": None}, ["None", "llama"]),
        ({"general.type": "adapter"}, ["adapter"]),
        ({"llama.expert_count": 8}, ["mixture of experts"]),
        ({"llama.rope.scaling.type": "longrope"}, ["longrope", "yarn"]),
        ({"llama.rope.dimension_count": 4}, ["rope.dimension_count", "4", "8"]),
        ({"llama.attention.sliding_window_pattern": 2}, ["windows"]),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_attn_factor": 2.0}, ["yarn_attn_factor"]),
    ],
)
def test_what_is_not_served_is_named(changes: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        from_gguf({**metadata(), **changes}, EMBED)
    assert all(word in str(caught.value) for word in named)


@pytest.mark.parametrize("key", ["block_count", "context_length", "embedding_length", "attention.head_count"])
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(CorruptFileError, match=f"llama.{key}"):
        from_gguf(metadata(**{key: None}), EMBED)


def test_heads_per_layer_are_refused() -> None:
    with pytest.raises(CorruptFileError, match="head_count_kv"):
        from_gguf(metadata(**{"attention.head_count_kv": [2, 2, 1, 1]}), EMBED)


def test_more_layers_than_a_model_can_have() -> None:
    with pytest.raises(CorruptFileError, match=r"llama\.block_count"):
        from_gguf(metadata(block_count=2**32 - 1), EMBED)


def test_no_embedding() -> None:
    with pytest.raises(CorruptFileError, match="token_embd"):
        from_gguf(metadata(), {})
