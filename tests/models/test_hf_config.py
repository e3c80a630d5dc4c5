"""ModelConfig from config.json: what each family means by its keys, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, SmolLM3Config

from jaxserve.errors import CorruptFileError, UnsupportedModelError
from jaxserve.models import RopeScaling, from_hf

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def llama(**changes: Any) -> dict[str, Any]:
    """A config.json of an old-style Llama."""
    return {"architectures": ["LlamaForCausalLM"], **SHAPE, **changes}


def saved(kind: Any, architecture: str, **changes: Any) -> dict[str, Any]:
    """What transformers writes for a configuration."""
    config: dict[str, Any] = kind(**{**SHAPE, "pad_token_id": 0, **changes}).to_dict()
    return {**config, "architectures": [architecture]}


def test_shape_and_head_size() -> None:
    config = from_hf(llama())
    assert (config.family, config.vocab_size, config.hidden_size, config.intermediate_size) == ("llama", 96, 32, 48)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (4, 4, 2, 8)
    assert config.max_position == 128
    assert config.windows == (None,) * 4
    assert config.rope_layers == (True,) * 4
    assert from_hf(llama(head_dim=16)).head_dim == 16
    assert from_hf(llama(num_key_value_heads=None)).num_kv_heads == 4
    hash(config)


def test_llama_biases() -> None:
    config = from_hf(llama(attention_bias=True, mlp_bias=True))
    assert config.qkv_bias
    assert config.o_bias
    assert config.mlp_bias
    config = from_hf(saved(LlamaConfig, "LlamaForCausalLM"))
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (False, False, False)


@pytest.mark.parametrize(("window", "expected"), [(8, 8), (None, None)])
def test_mistral_slides_every_layer(window: int | None, expected: int | None) -> None:
    config = from_hf(saved(MistralConfig, "MistralForCausalLM", sliding_window=window))
    assert config.family == "mistral"
    assert config.windows == (expected,) * 4


def test_mistral_without_the_key_has_the_window_of_transformers() -> None:
    config = {"architectures": ["MistralForCausalLM"], **SHAPE}
    assert from_hf(config).windows == (4096,) * 4


def test_qwen2_has_qkv_bias_and_no_window_unless_switched_on() -> None:
    config = from_hf(saved(Qwen2Config, "Qwen2ForCausalLM", sliding_window=8))
    assert config.qkv_bias
    assert not config.o_bias
    assert config.windows == (None,) * 4
    raw = {"architectures": ["Qwen2ForCausalLM"], **SHAPE, "use_sliding_window": False, "sliding_window": 8}
    assert from_hf({**raw, "max_window_layers": 0}).windows == (None,) * 4


def test_qwen2_windows_by_layer() -> None:
    raw = {"architectures": ["Qwen2ForCausalLM"], **SHAPE, "use_sliding_window": True, "sliding_window": 8}
    assert from_hf({**raw, "max_window_layers": 3}).windows == (None, None, None, 8)
    types = ["sliding_attention", "full_attention"] * 2
    assert from_hf({**raw, "layer_types": types}).windows == (8, None, 8, None)
    ours = from_hf(
        saved(Qwen2Config, "Qwen2ForCausalLM", use_sliding_window=True, sliding_window=8, max_window_layers=1)
    )
    assert ours.windows == (None, 8, 8, 8)


def test_qwen3_norms_and_head_size() -> None:
    config = from_hf(saved(Qwen3Config, "Qwen3ForCausalLM", head_dim=16, attention_bias=True))
    assert config.qk_norm
    assert config.head_dim == 16
    assert config.qkv_bias
    assert config.o_bias


def test_smollm3_layers_without_rope() -> None:
    config = from_hf(saved(SmolLM3Config, "SmolLM3ForCausalLM"))
    assert config.rope_layers == (True, True, True, False)
    assert config.tie_embeddings
    assert config.rope_theta == 2000000.0
    raw = {"architectures": ["SmolLM3ForCausalLM"], **SHAPE}
    assert from_hf(raw).rope_theta == 2000000.0
    assert from_hf(raw).tie_embeddings
    assert from_hf({**raw, "no_rope_layer_interval": 2}).rope_layers == (True, False, True, False)
    assert from_hf({**raw, "no_rope_layers": [0, 1, 1, 1, 1]}).rope_layers == (False, True, True, True)
    windows = from_hf({**raw, "use_sliding_window": True, "sliding_window": 8}).windows
    assert windows == (None, None, None, 8)


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("kind_key", ["rope_type", "type"])
def test_rope_scaling_in_old_and_new_keys(key: str, kind_key: str) -> None:
    params = {kind_key: "linear", "factor": 4.0}
    theta = {"rope_theta": 5000.0}
    raw = llama(**{key: {**params, **theta}}) if key == "rope_parameters" else llama(**{key: params}, **theta)
    config = from_hf(raw)
    assert config.rope_theta == 5000.0
    assert config.rope_scaling == RopeScaling("linear", factor=4.0, original_max_position=128)


def test_llama3_scaling() -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    config = from_hf(saved(LlamaConfig, "LlamaForCausalLM", rope_parameters=rope))
    assert config.rope_theta == 500000.0
    assert config.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, original_max_position=64)
    assert config.max_position == 128


def test_yarn_reaches_beyond_the_stated_context() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 16}
    config = from_hf(llama(rope_scaling=rope))
    assert config.rope_scaling == RopeScaling("yarn", 4.0, original_max_position=128, beta_fast=16.0)
    assert config.max_position == 512
    scaled = from_hf(llama(rope_scaling={**rope, "attention_factor": 1.5, "truncate": False})).rope_scaling
    assert scaled is not None
    assert scaled.attention_factor == 1.5
    assert not scaled.truncate


def test_dynamic_scaling_counts_from_the_longest_position() -> None:
    config = from_hf(llama(rope_scaling={"type": "dynamic", "factor": 2.0}))
    assert config.rope_scaling == RopeScaling("dynamic", factor=2.0, original_max_position=128)


def test_default_rope_is_no_scaling() -> None:
    config = from_hf(llama(rope_parameters={"rope_type": "default", "rope_theta": 777.0}))
    assert config.rope_scaling is None
    assert config.rope_theta == 777.0
    assert from_hf(llama(rope_scaling=None)).rope_theta == 10000.0


@pytest.mark.parametrize(
    ("own", "generation", "expected"),
    [(2, [2, 0], (0, 2)), ([5, 3], 4, (3, 4, 5)), (None, None, ()), (7, None, (7,))],
)
def test_end_tokens_are_the_union_of_both_files(own: Any, generation: Any, expected: tuple[int, ...]) -> None:
    config = from_hf(llama(eos_token_id=own), {"eos_token_id": generation})
    assert config.eos_token_ids == expected


def test_checkpoint_dtype_in_old_and_new_keys() -> None:
    assert from_hf(llama(torch_dtype="bfloat16")).checkpoint_dtype == "bfloat16"
    assert from_hf(llama(dtype="float16")).checkpoint_dtype == "float16"
    assert from_hf(llama()).checkpoint_dtype == "float32"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, ["MambaForCausalLM", "LlamaForCausalLM", "Qwen3ForCausalLM"]),
        ({"architectures": None}, ["none", "LlamaForCausalLM"]),
        ({"hidden_act": "gelu"}, ["gelu", "silu"]),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, ["gptq", "safetensors"]),
        ({"quantization_config": {"quant_method": "awq"}}, ["awq"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["fp8"]),
        ({"rope_scaling": {"rope_type": "longrope"}}, ["longrope", "llama3", "yarn"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["layer type"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
    ],
)
def test_what_is_not_served_is_named(changes: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        from_hf(llama(**changes))
    assert all(word in str(caught.value) for word in named)


@pytest.mark.parametrize("key", [k for k in SHAPE if k != "num_key_value_heads"])
def test_a_missing_key_is_named(key: str) -> None:
    raw = llama()
    del raw[key]
    with pytest.raises(CorruptFileError, match=f"config.json has no {key}"):
        from_hf(raw)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"hidden_size": "32"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"vocab_size": True}, "vocab_size"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"num_key_value_heads": 3}, "num_attention_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"eos_token_id": ["</s>"]}, "eos_token_id"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": [1]}, "rope_parameters"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers"),
        ({"max_position_embeddings": 10**400}, "max_position_embeddings"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"rope_scaling": {"type": "yarn", "factor": 1e308}}, "factor"),
    ],
)
def test_a_wrong_value_is_named(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(CorruptFileError, match=key):
        from_hf(llama(**changes))


@pytest.mark.parametrize(
    "types", [["full_attention"] * 3, ["chunked_attention"] * 4, "full_attention", [["full_attention"]] * 4]
)
def test_wrong_layer_types_are_named(types: Any) -> None:
    raw = {"architectures": ["Qwen3ForCausalLM"], **SHAPE, "layer_types": types}
    with pytest.raises(CorruptFileError, match="layer_types"):
        from_hf(raw)


def test_wrong_layers_without_rope_are_named() -> None:
    raw = {"architectures": ["SmolLM3ForCausalLM"], **SHAPE, "no_rope_layers": [[1]] * 4}
    with pytest.raises(CorruptFileError, match="no_rope_layers"):
        from_hf(raw)
