"""A miniature that writes the same tokens over and over, and what it is trained and served with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tokenizer.samples import byte_level_metadata
from tests.weights.checkpoints import tiny_model, write_gguf

__all__ = ["CYCLE", "FLAGS", "SETTINGS", "data", "target"]

SETTINGS: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 1, "max_num_batched_tokens": 4, "warmup": False}
SETTINGS |= {"weight_cache_dir": "off", "num_gpu_blocks_override": 8}
FLAGS = [
    *("--max-model-len", "64", "--max-num-seqs", "8", "--max-num-batched-tokens", "8", "--no-warmup"),
    *("--weight-cache-dir", "off", "--num-gpu-blocks-override", "40"),
    *("--draft-vocab-size", "100", "--max-prompt-tokens", "1", "--max-tokens", "40", "--temperature", "0"),
]
CYCLE = np.random.default_rng(3).permutation(np.arange(100, 132)).tolist()
"""The tokens that the model writes, each after the one before."""


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that writes CYCLE, whatever the prompt."""
    sizes = {"vocab_size": 288, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    model = tiny_model("llama", tie_word_embeddings=False, **sizes)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.norm.weight.fill_(1.0)
        model.lm_head.weight.mul_(0.01)
        for token, next_token in zip(CYCLE, CYCLE[1:] + CYCLE[:1], strict=True):
            model.lm_head.weight[next_token] = model.model.embed_tokens.weight[token]
    path = tmp_path_factory.mktemp("target") / "model.gguf"
    write_gguf(path, model, "llama", metadata=byte_level_metadata("gpt-2", ["a b"]))
    return path


@pytest.fixture(scope="session")
def data(target: Path) -> Path:
    """Prompts of a token each."""
    path = target.with_name("data.jsonl")
    path.write_text("\n".join(json.dumps({"text": chr(letter)}) for letter in range(100, 124)))
    return path
