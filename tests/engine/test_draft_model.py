"""A draft model, Medusa heads or an EAGLE head beside the served model: loaded, used, or refused with the reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve import LLM, SamplingParams
from jaxserve.config import ModelOptions, SpeculativeConfig
from jaxserve.engine.drafts import open_drafts
from jaxserve.engine.speculation import resolve
from jaxserve.errors import ConfigError
from jaxserve.models.config import ModelConfig
from jaxserve.tokenizer import load_tokenizer
from jaxserve.training.eagle import first_head, head_of
from jaxserve.weights import default_drafts, open_model, save_eagle, save_medusa
from tests.tokenizer.samples import byte_level_metadata
from tests.weights.checkpoints import tiny_model, write_gguf

SETTINGS: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 16, "warmup": False}
SETTINGS |= {"weight_cache_dir": "off", "num_gpu_blocks_override": 20, "speculative_adaptive": False}


def write(path: Path, merge: str = "a b", **more: int) -> Path:
    sizes = {"vocab_size": 288, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16, **more}
    model = tiny_model("llama", tie_word_embeddings=True, **sizes)
    write_gguf(path, model, "llama", metadata=byte_level_metadata("gpt-2", [merge]))
    return path


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("target") / "model.gguf")


def test_a_draft_model_is_served_beside_the_model(target: Path, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompts = [list(range(20, 40)), [7, 8, 9]]
    with LLM(target, **SETTINGS) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    for draft, least in ((target, 0.95), (write(tmp_path / "draft.gguf", num_hidden_layers=1), 0.0)):
        with LLM(target, speculative_model=str(draft), spec_tokens=2, **SETTINGS) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            stats = llm.engine.stats().speculation
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert stats.num_draft_tokens > 20
        assert stats.num_accepted_tokens >= least * stats.num_draft_tokens


def test_earlier_answers_foretell_later_ones(target: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With typical acceptance, which changes nothing where nothing is sampled, and is told of at the start."""
    flags = {
        "speculative_model": "[suffix]",
        "speculative_corpus_size": 300,
        "spec_decoding_acceptance_method": "typical_acceptance_sampler",
    }
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with LLM(target, **flags, **SETTINGS) as llm, LLM(target, **SETTINGS) as plain:
        first, second = (llm.generate([list(range(20, 40))], params, use_tqdm=False)[0] for _ in range(2))
        expected = plain.generate([list(range(20, 40))], params, use_tqdm=False)[0]
    assert first.outputs[0].token_ids == second.outputs[0].token_ids == expected.outputs[0].token_ids
    assert second.metrics.speculation.num_accepted_tokens >= 14
    assert expected.metrics.speculation.num_draft_tokens == 0
    assert "typical acceptance is lossy" in caplog.text


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ({"vocab_size": 300}, "has a vocabulary of 300 tokens, the served model one of 288"),
        ({"merge": "c d"}, "has another vocabulary: token 260 is 'cd', in the served model 'ab'"),
        ({"max_position_embeddings": 32}, "its longest context is 32 tokens, less than the 64 that are served"),
        (None, "--speculative-model: .*no/such"),
    ],
    ids=str,
)
def test_a_draft_model_that_cannot_work_is_refused(
    target: Path, tmp_path: Path, draft: dict[str, Any] | None, message: str
) -> None:
    path = "/no/such" if draft is None else str(write(tmp_path / "draft.gguf", **draft))
    with pytest.raises(ConfigError, match=message):
        LLM(target, speculative_model=path, **SETTINGS)


def write_heads(path: Path, hidden_size: int = 32, vocabulary: int | None = None) -> Path:
    block = {"weight": np.zeros((hidden_size, hidden_size)), "bias": np.zeros(hidden_size)}
    head = {"blocks": [block], "out": np.zeros((288, hidden_size))}
    tokens = None if vocabulary is None else np.arange(vocabulary - 288, vocabulary, dtype=np.int32)
    save_medusa(path, [head, head], "other/model", tokens, {})
    return path


@pytest.mark.parametrize(
    ("heads", "flags", "message"),
    [
        ({}, {"num_speculative_tokens": 3}, "--num-speculative-tokens is 3, but the 2 Medusa heads of .* give 2"),
        ({"hidden_size": 64}, {}, r"made for other/model and do not fit .*0.0.linear.bias has shape \[64\]"),
        ({"vocabulary": 300}, {}, "its vocabulary has token 299, the model 288"),
        (None, {"spec_method": "medusa"}, "--speculative-model: .*no/such"),
        (None, {"speculative_model": "medusa"}, "jaxserve train-draft --method medusa .*model.gguf data.jsonl"),
    ],
    ids=str,
)
def test_heads_that_cannot_work_are_refused(
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    heads: dict[str, Any] | None,
    flags: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = "/no/such" if heads is None else str(write_heads(tmp_path / "heads", **heads))
    with pytest.raises(ConfigError, match=message):
        LLM(target, **{"speculative_model": path, **flags}, **SETTINGS)


def write_eagle(path: Path, model: ModelConfig, taps: list[int] | None = None, **changes: Any) -> Path:
    """A head that hands states on; fused ones lack what makes them whole, which is noticed later than their layers."""
    head = head_of(replace(model, **changes))
    params = first_head(head, seed=1)
    notes = {} if taps is None else {"eagle_config": {"eagle_aux_hidden_state_layer_ids": taps}}
    save_eagle(path, jax.tree.map(np.asarray, params), head.layer, np.arange(280, 288, dtype=np.int32), notes)
    if taps is not None:
        tensors = load_file(path / "model.safetensors")
        save_file({**tensors, "midlayer.hidden_norm.weight": np.ones(4, np.float32)}, path / "model.safetensors")
    return path


@pytest.mark.parametrize(
    ("changes", "flags", "message"),
    [
        ({"hidden_size": 64}, {}, "does not fit .*: its hidden_size is 64, that of the model 32"),
        ({"vocab_size": 300}, {}, "does not fit .*: its vocab_size is 300, that of the model 288"),
        ({"taps": [0, 9]}, {}, "reads the layers 0, 9, but .* has 2"),
        ({"taps": [0, 1]}, {}, r"does not fit .*midlayer\..* is not"),
        ({}, {"speculative_eagle_topk": 40}, "--speculative-eagle-topk must be an integer from 1 to 32"),
        (None, {"spec_method": "eagle"}, "--speculative-model: .*no/such"),
        (None, {"speculative_model": "eagle"}, "jaxserve train-draft --method eagle .*model.gguf data.jsonl"),
    ],
    ids=str,
)
def test_an_eagle_head_that_cannot_work_is_refused(
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any] | None,
    flags: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = open_model(ModelOptions(model=str(target))).config
    path = "/no/such" if changes is None else str(write_eagle(tmp_path / "head", model, **changes))
    with pytest.raises(ConfigError, match=message):
        LLM(target, **{"speculative_model": path, **flags}, **SETTINGS)


def test_an_eagle_head_is_no_draft_model_with_a_tree(target: Path, tmp_path: Path) -> None:
    draft = str(write(tmp_path / "draft.gguf"))
    with pytest.raises(ConfigError, match="--speculative-eagle-topk has no effect on the draft model"):
        LLM(target, speculative_model=draft, speculative_eagle_topk=2, **SETTINGS)


def test_heads_are_found_where_training_leaves_them(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    write_heads(default_drafts("medusa", str(target)))
    options = ModelOptions(model=str(target))
    opened = open_model(options)
    tokenizer = load_tokenizer(opened.tokenizer_path, opened.gguf_metadata, None)
    for flags in ({"speculative_model": "medusa"}, {"spec_method": "medusa", "spec_tokens": 1}):
        settings = resolve(SpeculativeConfig(**flags), max_tokens=16)  # type: ignore[arg-type]
        found = open_drafts(settings, options, tokenizer, opened.config)
        assert found.settings is not None
        assert found.settings.method == "medusa"
        assert found.settings.num_drafts == found.max_depth == (1 if "spec_tokens" in flags else 2)
