"""An engine started from a quantised GGUF file serves the tokens that its leaves' logits say."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.config import ModelOptions
from jaxserve.errors import ConfigError
from jaxserve.quantization import PackedLeaf, WeightForm
from jaxserve.weights import open_model
from pallas_kernels.packed_matmul import select_backend
from tests.models.dense import all_logits
from tests.tokenizer.samples import byte_level_metadata
from tests.weights.checkpoints import tiny_model, write_gguf

SETTINGS: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 16, "warmup": False}
SETTINGS |= {"weight_cache_dir": "off", "compilation_cache_dir": "off"}
PROMPTS = [list(range(20, 40)), [7, 8, 9]]


def write(path: Path, kind: str, **more: int) -> Path:
    sizes = {"vocab_size": 288, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16, **more}
    model = tiny_model("llama", tie_word_embeddings=True, **sizes)
    write_gguf(path, model, "llama", kind_of=lambda name: kind, metadata=byte_level_metadata("gpt-2", ["a b"]))
    return path


@pytest.mark.parametrize("quantization", ["gguf", "int8"])
def test_greedy_tokens_are_those_of_the_logits(
    quantization: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "model.gguf", "Q4_1")
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with caplog.at_level(logging.INFO, "jaxserve"), LLM(path, quantization=quantization, **SETTINGS) as llm:
        outputs = llm.generate(PROMPTS, greedy, use_tqdm=False)
    stored = {"gguf": "int4", "int8": "int8"}[quantization]
    assert f"9 packed {stored}" in caplog.text
    opened = open_model(ModelOptions(str(path), weight_cache_dir="off"))
    params = opened.load("float32", form=WeightForm(quantization))
    assert isinstance(params["embed"], PackedLeaf)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        best = all_logits(params, opened.config, prompt + tokens).argmax(axis=1)
        assert tokens == best[len(prompt) - 1 : -1].tolist()
        assert len(np.unique(tokens)) > 1


def test_rounded_activations_are_served(tmp_path: Path) -> None:
    """Their tokens are those of leaves that round, and their log probabilities are not those of leaves that do not."""
    path = write(tmp_path / "model.gguf", "Q4_1")
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
    made: dict[str, list[Any]] = {}
    for how in ("none", "int8"):
        with LLM(path, quantization="gguf", activation_quantization=how, **SETTINGS) as llm:
            made[how] = llm.generate(PROMPTS, greedy, use_tqdm=False)
    opened = open_model(ModelOptions(str(path), weight_cache_dir="off"))
    backend = select_backend("auto")[0]
    params = opened.load("float32", form=WeightForm("gguf", backend=backend, activation_bits=8))
    for prompt, output, plain in zip(PROMPTS, made["int8"], made["none"], strict=True):
        tokens = list(output.outputs[0].token_ids)
        best = all_logits(params, opened.config, prompt + tokens).argmax(axis=1)
        assert tokens == best[len(prompt) - 1 : -1].tolist()
        assert output.outputs[0].cumulative_logprob != plain.outputs[0].cumulative_logprob


def test_activations_are_rounded_only_beside_quantised_weights(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", "Q4_1")
    with pytest.raises(ConfigError, match=r"quantization int8 needs quantised weights.*--quantization int8"):
        LLM(path, quantization="none", activation_quantization="int8", **SETTINGS)
    # No matrix has whole groups of 32 inputs, which is known when they are read.
    path = write(tmp_path / "odd.gguf", "F32", hidden_size=48, intermediate_size=72, head_dim=12)
    with pytest.raises(
        ConfigError, match=r"needs quantised weights.*--quantization int8 found no matrix of .*odd\.gguf"
    ):
        LLM(path, quantization="int8", activation_quantization="int8", **SETTINGS)


@pytest.mark.parametrize("kind", ["F32", "F16"])
def test_blocks_can_only_be_kept_where_there_are_some(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--quantization gguf .*model\.gguf.*Q4_0, Q4_1.*Use auto, none or int8"):
        LLM(write(tmp_path / "model.gguf", kind), quantization="gguf", **SETTINGS)
