"""A plan says what an engine of the same flags then allocates, byte by byte."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.config import EngineConfig
from jaxserve.engine.planning import Plan, make_plan
from jaxserve.engine.startup import Started, start
from jaxserve.runner import fit_blocks
from jaxserve.sizing import PlanOptions
from jaxserve.training.eagle import first_head, head_of
from jaxserve.weights import open_model, save_eagle, save_medusa
from tests.tokenizer.samples import byte_level_metadata
from tests.weights.checkpoints import tiny_model, write_gguf

SETTINGS: dict[str, Any] = {
    "max_num_seqs": 3,
    "max_num_batched_tokens": 16,
    "num_gpu_blocks_override": 7,
    "warmup": False,
    "weight_cache_dir": "off",
    "attention_backend": "reference",
}
LORA = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 5}
SUFFIX = {"speculative_model": "[suffix]", "speculative_corpus_size": 300}


def kind_of(name: str) -> str:
    """Matrices of one kind, of two that are merged, of floats beside blocks, and a table."""
    kinds = {"attn_q.": "Q4_0", "attn_k.": "Q8_0", "attn_v.": "Q5_1", "ffn_gate.": "Q4_1", "ffn_up.": "Q4_1"}
    kinds |= {"attn_output.": "Q5_0", "token_embd.": "Q8_0"}
    return next((kind for part, kind in kinds.items() if part in name), "F32")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GGUF files with quantised matrices and without, one of fewer layers, and heads."""
    folder = tmp_path_factory.mktemp("models")
    metadata = byte_level_metadata("gpt-2", ["a b"])
    sizes = {"vocab_size": 283, "intermediate_size": 80, "num_hidden_layers": 2, "hidden_size": 64, "head_dim": 32}
    for name, more in (("floats", {}), ("small", {"num_hidden_layers": 1})):
        model = tiny_model("llama", tie_word_embeddings=name == "small", **{**sizes, **more})
        write_gguf(folder / f"{name}.gguf", model, "llama", metadata=metadata)
    blocks = tiny_model("llama-biased", **{**sizes, "intermediate_size": 96})
    write_gguf(folder / "blocks.gguf", blocks, "llama", kind_of=kind_of, metadata=metadata)
    config = open_model(EngineConfig.from_flat({"model": str(folder / "floats.gguf")}).model).config
    head = head_of(config)
    params = jax.tree.map(np.asarray, first_head(head, seed=1))
    block = {"weight": np.eye(64, dtype=np.float32), "bias": np.zeros(64, np.float32)}
    heads = [{"blocks": [block], "out": np.ones((40, 64), np.float32)}] * 2
    save_medusa(folder / "medusa", heads, "floats", np.arange(40, dtype=np.int32), {})
    save_eagle(folder / "eagle", params, head.layer, np.arange(40, dtype=np.int32), {})
    return folder


def both(models: Path, name: str, **flags: Any) -> tuple[Plan, Started]:
    """A plan, and the engine."""
    config = EngineConfig.from_flat({"model": str(models / f"{name}.gguf"), **SETTINGS, **flags})
    return make_plan(config, PlanOptions(), {}), start(config)


def size(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("floats", {}),
        ("floats", {"quantization": "int8"}),
        ("floats", {"dtype": "bfloat16", "block_size": 8, **LORA}),
        ("floats", {"quantization": "gguf", "load_format": "dummy"}),
        ("blocks", {"quantization": "none", **SUFFIX}),
        ("blocks", {"quantization": "int8", **LORA, "lora_embeddings": True, "lora_dtype": "bfloat16"}),
        ("blocks", {"quantization": "gguf", **LORA, "lora_target_modules": ["q_proj", "up_proj"]}),
        ("blocks", {"speculative_model": "[ngram]", "max_model_len": 50}),
        ("floats", {"speculative_model": "small.gguf", "spec_tokens": 2}),
        ("floats", {"speculative_model": "medusa"}),
        ("floats", {"speculative_model": "eagle", "spec_tokens": 2, "quantization": "int8"}),
        ("floats", {"speculative_model": "eagle", "speculative_eagle_topk": 2, "spec_tokens": 6}),
    ],
)
def test_a_plan_is_what_an_engine_allocates(models: Path, name: str, flags: dict[str, Any]) -> None:
    if flags.get("speculative_model") in ("small.gguf", "medusa", "eagle"):
        flags = {**flags, "speculative_model": str(models / flags["speculative_model"])}
    plan, started = both(models, name, **flags)
    runner, memory = started.engine.runner, plan.memory
    drafter, state = runner._drafter, runner._state
    assert sum(memory.weights.values()) == size(runner.params) == runner.weight_bytes
    own = {id(leaf): leaf for leaf in jax.tree.leaves(drafter.params)}
    for leaf in jax.tree.leaves(runner.params):
        own.pop(id(leaf), None)
    assert sum(memory.draft_weights.values()) == size(list(own.values()))
    draft_kv = getattr(drafter.state, "kv", None)
    assert memory.kv is not None
    assert memory.kv.num_bytes == size(state.kv) + size(draft_kv)
    assert memory.kv.num_blocks == runner.shape.num_blocks
    assert memory.rows == size(state.rows)
    assert memory.drafts == size((drafter.drafts, drafter.state)) - size(draft_kv)
    assert memory.masks == size(runner._no_mask)
    assert memory.adapters == size(runner.adapters.arrays()) == started.adapters.num_bytes
    assert memory.max_model_len == started.max_model_len
    assert (plan.max_num_seqs, plan.max_num_batched_tokens) == (runner.shape.max_rows, runner.shape.max_tokens)
    assert plan.dtype == runner.shape.dtype.name
    assert plan.problems == ()
    runner.close()


def test_blocks_by_free_memory_are_as_many(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free, flags = 3 << 20, {"num_gpu_blocks_override": None, "max_model_len": 128, "max_num_seqs": 40, **LORA}
    flags |= {"max_num_batched_tokens": 40}
    monkeypatch.setattr("jaxserve.sizing.memory.free_ram", lambda: free)
    config = EngineConfig.from_flat({"model": str(models / "floats.gguf"), **SETTINGS, **flags})
    plan = make_plan(config, PlanOptions(), {})
    held = sum(plan.memory.weights.values()) + plan.memory.adapters
    monkeypatch.setattr("jaxserve.runner.memory.free_ram", lambda: free - held)
    started = start(config)
    assert plan.memory.kv is not None
    assert 7 < plan.memory.kv.num_blocks == started.engine.runner.shape.num_blocks < 200
    assert "25% of free memory" in plan.memory.kv.reason
    started.engine.runner.close()


def test_blocks_by_the_share_of_a_gpu_are_as_many(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device is in the place of a GPU: what the runner asks it is all that counts."""
    flags = {"num_gpu_blocks_override": None, "max_model_len": 128, "dtype": "float32", "gpu_memory_utilization": 0.8}
    config = EngineConfig.from_flat({"model": str(models / "floats.gguf"), **SETTINGS, **flags})
    plan = make_plan(config, PlanOptions(gpu=str(4 << 20)), {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"})
    stats = {"bytes_limit": 2 << 20, "bytes_in_use": sum(plan.memory.weights.values())}
    device = SimpleNamespace(platform="gpu", memory_stats=lambda: stats)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    opened = open_model(config.model)
    found = fit_blocks(config.cache, opened.config, np.dtype("float32"), most_useful=10**6)
    assert plan.memory.kv is not None
    assert plan.memory.kv.num_blocks == min(found.num_blocks, 3 * 8 + 1)
    assert plan.memory.largest_max_model_len == min(128, (found.num_blocks - 1) * 16)


def test_scratch_is_less_than_the_bound(models: Path) -> None:
    """Of the largest programs, as XLA counts it."""
    for name, flags in (("floats", {}), ("blocks", {"quantization": "gguf", **LORA})):
        plan, started = both(models, name, **{**flags, "attention_backend": "auto"})
        runner, work = started.engine.runner, plan.memory.workspace
        adapted = "enable_lora" in flags
        forward = runner._lower_forward(runner.buckets.forward()[-1], adapted=adapted).compile().memory_analysis()
        sample = runner._lower_sample(runner.buckets.places[-1]).compile().memory_analysis()
        assert 0 < forward.temp_size_in_bytes + _made(forward) <= work.forward
        assert 0 < sample.temp_size_in_bytes + _made(sample) <= work.sampling
        runner.close()


def _made(analysis: Any) -> int:
    """Bytes of results that are no updated arguments."""
    return int(analysis.output_size_in_bytes - analysis.alias_size_in_bytes)
