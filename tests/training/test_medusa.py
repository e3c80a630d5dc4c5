"""Heads of a miniature: trained in seconds, stopped and continued, and served."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jaxserve import LLM, SamplingParams
from jaxserve.cli import main
from jaxserve.errors import ConfigError
from jaxserve.training import medusa
from jaxserve.training.distill import Examples
from jaxserve.training.medusa import Acceptance, draft_vocabulary, first_heads, measure, train
from jaxserve.training.options import TrainOptions
from jaxserve.training.prompts import read_lines
from jaxserve.weights import open_medusa
from tests.tokenizer.samples import byte_level_metadata
from tests.weights.checkpoints import tiny_model, write_gguf

SETTINGS: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 1, "max_num_batched_tokens": 4, "warmup": False}
SETTINGS |= {"weight_cache_dir": "off", "num_gpu_blocks_override": 8}
FLAGS = [
    *("--max-model-len", "64", "--max-num-seqs", "8", "--max-num-batched-tokens", "8", "--no-warmup"),
    *("--weight-cache-dir", "off", "--num-gpu-blocks-override", "40"),
    *("--num-heads", "3", "--draft-vocab-size", "100", "--max-prompt-tokens", "1", "--max-tokens", "40"),
    *("--temperature", "0", "--steps", "100", "--batch-size", "64", "--learning-rate", "0.02"),
]
CYCLE = np.random.default_rng(3).permutation(np.arange(100, 132)).tolist()
"""The tokens that the model writes, each after the one before."""


@pytest.fixture(scope="module")
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


@pytest.fixture(scope="module")
def trained(target: Path) -> Path:
    """The folder of heads that were trained for it."""
    data, output = target.with_name("data.jsonl"), target.with_name("heads")
    data.write_text("\n".join(json.dumps({"text": chr(letter)}) for letter in range(100, 124)))
    assert main(["train-draft", str(target), str(data), "--output", str(output), *FLAGS]) == 0
    return output


def test_trained_heads_are_far_better_than_untrained_ones(
    target: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = open_medusa(str(trained))
    assert heads.vocabulary is not None
    assert len(heads.vocabulary) == 128, "100, rounded up to a whole number of 64s"
    with LLM(target, speculative_model=str(trained), speculative_adaptive=False, **SETTINGS) as llm:
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        (output,) = llm.generate([[CYCLE[0]]], params, use_tqdm=False)
        stats = llm.engine.stats().speculation
    assert output.outputs[0].token_ids == (CYCLE + CYCLE)[1:41]
    assert stats.accepted_by_position[2] > 0
    assert stats.num_accepted_tokens > 0.5 * stats.num_draft_tokens > 10


def test_the_same_command_goes_on_and_another_is_refused(
    target: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (trained / "medusa_lm_head.safetensors").read_bytes()
    argv = ["train-draft", str(target), str(target.with_name("data.jsonl")), "--output", str(trained), *FLAGS]
    assert main(argv) == 0
    report = capsys.readouterr().out
    assert "head 3: right" in report
    assert "(untrained 0.0%)" in report
    assert "tokens per step of a chain" in report
    assert (trained / "medusa_lm_head.safetensors").read_bytes() == before
    assert main([*argv, "--max-tokens", "50"]) == 2
    assert "holds a training with another max_tokens (40, now 50)" in capsys.readouterr().err


def random_examples() -> Examples:
    rng = np.random.default_rng(1)
    targets = rng.integers(0, 64, (100, 2)).astype(np.int32)
    return Examples(rng.standard_normal((100, 8)).astype(np.float32), targets)


def test_a_training_that_was_stopped_ends_as_if_it_was_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples, table = random_examples(), np.ones((64, 8), np.float32)
    options = replace(TrainOptions(num_heads=2, batch_size=16, steps=12))
    whole = train(examples, first_heads(table, 2, 1), None, options, tmp_path / "whole", seed=4)

    def interrupted(folder: Path, step: int, state: Any) -> None:
        save(folder, step, state)
        if step == 5:
            raise KeyboardInterrupt

    save = medusa.save
    monkeypatch.setattr(medusa, "_SAVE_SECONDS", 0.0)
    monkeypatch.setattr(medusa, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(examples, first_heads(table, 2, 1), None, options, tmp_path / "stopped", seed=4)
    resumed = train(examples, first_heads(table, 2, 1), None, options, tmp_path / "stopped", seed=4)
    for one, other in zip(whole, resumed, strict=True):
        np.testing.assert_array_equal(one["out"], other["out"])
        np.testing.assert_array_equal(one["blocks"][0]["weight"], other["blocks"][0]["weight"])


def test_untrained_heads_guess_what_the_model_s_own_head_does() -> None:
    rng = np.random.default_rng(2)
    table, hidden = rng.standard_normal((64, 8)), rng.standard_normal((50, 8)).astype(np.float32)
    best = (hidden @ table.T).argmax(1)
    targets = np.stack([best, np.where(np.arange(50) < 20, best, -1)], axis=1).astype(np.int32)
    found = measure(first_heads(table, 2, 1), None, Examples(hidden, targets))
    np.testing.assert_allclose(found.right[:, 0], 1.0)
    assert found.length == 3.0


def test_a_draft_vocabulary_holds_the_most_frequent_tokens() -> None:
    targets = np.array([[300, 300, 7], [299, -1, 300]], np.int32)
    found = draft_vocabulary(targets, 64, 320)
    assert found is not None
    assert found.tolist() == [*range(62), 299, 300]
    assert draft_vocabulary(targets, 0, 320) is None
    assert draft_vocabulary(targets, 300, 320) is None


def test_the_best_paths_come_first() -> None:
    paths = Acceptance(np.array([[0.6, 0.28], [0.5, 0.1]]), 1.9).paths()
    assert paths == [[0], [0, 0], [1], [1, 0], [0, 1], [1, 1]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"text": "a"}', "must hold at least 2 prompts, got 1"),
        ('{"text": "a"}\n{', "line 2 is no JSON"),
        ('{"text": "a"}\n[1]', "line 2 must be a JSON object, got list"),
        ('{"text": "a"}\n{"txt": "b"}', 'line 2 must have "prompt" or "text"'),
    ],
)
def test_data_that_is_no_prompts_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_lines(path)


def test_options_have_limits() -> None:
    for wrong, message in (
        ({"num_heads": 0}, "num_heads must be from 1 to 16"),
        ({"learning_rate": 0.0}, "learning_rate must be in"),
        ({"max_tokens": 4}, r"max_tokens \(4\) must be more than --num-heads \(4\)"),
        ({"method": "magic"}, "method must be one of medusa"),
    ):
        with pytest.raises(ConfigError, match=message):
            TrainOptions(**wrong)  # type: ignore[arg-type]
