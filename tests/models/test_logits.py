"""The decoder's logits against transformers, for a tiny random model of every family and RoPE scaling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
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

from jaxserve.config import ModelOptions
from jaxserve.weights import open_model
from tests.models.dense import all_logits, hidden_states

CONTEXT = 128
TOKENS = np.random.default_rng(5).integers(0, 96, 75).tolist()
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 500000.0,
}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "llama, tied, with biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama, as many KV heads as heads": (LlamaConfig, {"num_key_value_heads": 4}),
    "llama, heads wider than the model": (LlamaConfig, {"head_dim": 24}),
    "llama, linear": (
        LlamaConfig,
        {"head_dim": 16, "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}},
    ),
    "llama, llama3": (LlamaConfig, {"head_dim": 16, "rope_parameters": LLAMA3}),
    "llama, yarn": (LlamaConfig, {"head_dim": 16, "rope_parameters": YARN}),
    "llama, yarn with attention factor": (
        LlamaConfig,
        {"head_dim": 16, "rope_parameters": {**YARN, "attention_factor": 1.4}},
    ),
    "llama, yarn with its own betas": (
        LlamaConfig,
        {"head_dim": 16, "rope_parameters": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}},
    ),
    "llama, dynamic, within its context": (
        LlamaConfig,
        {"head_dim": 16, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
    ),
    "mistral, window": (MistralConfig, {"sliding_window": 8}),
    "mistral, no window": (MistralConfig, {"sliding_window": None}),
    "qwen2": (Qwen2Config, {}),
    "qwen2, window in the upper layers": (
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "qwen3, tied": (Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True}),
    "smollm3": (SmolLM3Config, {"num_hidden_layers": 4}),
    "smollm3, RoPE in every second layer": (SmolLM3Config, {"no_rope_layers": [1, 0]}),
}


def tiny(kind: Any, changes: dict[str, Any]) -> PreTrainedModel:
    config = kind(
        **{
            "vocab_size": 96,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": CONTEXT,
            "pad_token_id": 0,
            **changes,
        }
    )
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # norms and biases too must have values of their own
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.25)
    return model


def expected(model: PreTrainedModel, tokens: list[int]) -> NDArray[np.float32]:
    with torch.no_grad():
        return np.asarray(model(torch.tensor([tokens])).logits[0].float().numpy())


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers_whole_and_in_chunks(case: str, tmp_path: Path) -> None:
    model = tiny(*CASES[case])
    model.save_pretrained(tmp_path)
    opened = open_model(ModelOptions(model=str(tmp_path)))
    params = opened.load("float32")
    want = expected(model, TOKENS)
    assert np.abs(want).max() > 1.0  # else a small difference says nothing
    np.testing.assert_allclose(all_logits(params, opened.config, TOKENS), want, atol=1e-4)
    chunks = [30, 1, 1, 30, 13]
    np.testing.assert_allclose(all_logits(params, opened.config, TOKENS, chunks), want, atol=1e-4)


def test_hidden_states_equal_those_of_transformers(tmp_path: Path) -> None:
    model = tiny(LlamaConfig, {})
    model.save_pretrained(tmp_path)
    opened = open_model(ModelOptions(model=str(tmp_path)))
    with torch.no_grad():
        want = np.asarray(model(torch.tensor([TOKENS]), output_hidden_states=True).hidden_states[-1][0].numpy())
    got = hidden_states(opened.load("float32"), opened.config, TOKENS)
    assert np.abs(want).max() > 1.0
    np.testing.assert_allclose(got, want, atol=1e-4)


def test_a_window_is_exact_at_every_prompt_length_whole_and_in_chunks(tmp_path: Path) -> None:
    model = tiny(MistralConfig, {"sliding_window": 8})
    model.save_pretrained(tmp_path)
    opened = open_model(ModelOptions(model=str(tmp_path)))
    params = opened.load("float32")
    for length in range(6, 21):
        want = expected(model, TOKENS[:length])
        for chunks in (None, [4, length - 4], [length - 1, 1]):
            got = all_logits(params, opened.config, TOKENS[:length], chunks)
            np.testing.assert_allclose(got, want, atol=1e-4)


def test_dynamic_scaling_gives_the_same_keys_whole_and_in_chunks_beyond_the_trained_context(tmp_path: Path) -> None:
    model = tiny(
        LlamaConfig,
        {
            "max_position_embeddings": 32,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
        },
    )
    model.save_pretrained(tmp_path)
    opened = open_model(ModelOptions(model=str(tmp_path)))
    params = opened.load("float32")
    whole = all_logits(params, opened.config, TOKENS)
    np.testing.assert_allclose(all_logits(params, opened.config, TOKENS, [40, 1, 34]), whole, atol=1e-4)
    np.testing.assert_allclose(whole[:32], expected(model, TOKENS[:32]), atol=1e-4)
    assert np.abs(whole[-1] - expected(model, TOKENS)[-1]).max() > 1e-3  # transformers rotates by the call's length


def test_bfloat16_stays_near(tmp_path: Path) -> None:
    model = tiny(Qwen3Config, {"head_dim": 16})
    model.save_pretrained(tmp_path)
    opened = open_model(ModelOptions(model=str(tmp_path)))
    want = expected(model, TOKENS)
    got = all_logits(opened.load("bfloat16"), opened.config, TOKENS)
    assert np.abs(got - want).max() < 0.1 * np.abs(want).max()
