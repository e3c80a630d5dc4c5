"""The tree of parameters that a configuration asks for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxserve.errors import UnsupportedModelError
from jaxserve.models import ModelConfig, Transform, param_specs
from jaxserve.models.registry import FAMILIES, family_of_architectures

CONFIG = ModelConfig("llama", 96, 32, 48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, max_position=128)


def test_tree_of_a_plain_model() -> None:
    tree = param_specs(CONFIG, "hf")
    assert set(tree) == {"embed", "layers", "final_norm", "lm_head"}
    shapes = {name: spec.shape for name, spec in tree["layers"][1].items()}
    assert shapes == {
        "input_norm": (32,),
        "qkv": (32, 64),
        "o": (32, 32),
        "post_norm": (32,),
        "gate_up": (32, 96),
        "down": (48, 32),
    }
    assert tree["embed"].shape == tree["lm_head"].shape == (96, 32)
    assert [s.name for s in tree["layers"][1]["qkv"].sources] == [
        f"model.layers.1.self_attn.{p}_proj.weight" for p in "qkv"
    ]


def test_tied_models_have_no_head() -> None:
    assert "lm_head" not in param_specs(replace(CONFIG, tie_embeddings=True), "hf")


def test_biases_and_norms_on_request() -> None:
    config = replace(CONFIG, family="qwen3", qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True)
    layer = param_specs(config, "gguf")["layers"][0]
    shapes = {n: s.shape for n, s in layer.items() if n.endswith("bias") or n[1:] == "_norm"}
    assert shapes == {
        "qkv_bias": (64,),
        "o_bias": (32,),
        "gate_up_bias": (96,),
        "down_bias": (32,),
        "q_norm": (8,),
        "k_norm": (8,),
    }


def test_axes_match_shapes_and_sources_fill_them() -> None:
    config = replace(CONFIG, family="qwen3", qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True)
    for layer in param_specs(config, "hf")["layers"]:
        for spec in layer.values():
            assert len(spec.axes) == len(spec.shape)
            assert sum(s.shape[0] for s in spec.sources) == spec.shape[-1]


@pytest.mark.parametrize(
    ("family", "heads"), [("llama", [4, 2, 0]), ("smollm3", [4, 2, 0]), ("qwen2", [0, 0, 0]), ("qwen3", [0, 0, 0])]
)
def test_gguf_row_order_of_q_and_k(family: str, heads: list[int]) -> None:
    layer = param_specs(replace(CONFIG, family=family, qkv_bias=True), "gguf")["layers"][0]
    for name in ("qkv", "qkv_bias"):
        assert [s.heads for s in layer[name].sources] == heads
    assert all(s.heads == 0 for s in param_specs(CONFIG, "hf")["layers"][0]["qkv"].sources)
    assert (layer["qkv"].sources[0].transform is Transform.UNPERMUTE_TRANSPOSE) == (heads[0] > 0)


def test_the_first_served_architecture_counts() -> None:
    assert family_of_architectures(["Other", "Qwen2ForCausalLM"]) is FAMILIES["qwen2"]
    with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel"):
        family_of_architectures(["GPT2LMHeadModel"])
