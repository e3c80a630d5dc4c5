"""Opening a model: what is found where, and random weights."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.config import ModelOptions
from jaxserve.errors import ConfigError, CorruptFileError, MissingFileError, ShapeMismatchError
from jaxserve.models import ModelConfig, param_specs
from jaxserve.quantization import WeightForm
from jaxserve.weights import init_random, open_model
from pallas_kernels.packed_matmul import unpack
from tests.weights.checkpoints import tiny_model, write_gguf


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("llama").save_pretrained(tmp_path)
    return tmp_path


def test_hugging_face_folder(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    with caplog.at_level(logging.INFO, "jaxserve"):
        opened = open_model(ModelOptions(str(folder)))
        params = opened.load(jnp.dtype("float32"))
    assert opened.name == str(folder)
    assert opened.config.eos_token_ids == (0, 2)
    assert opened.tokenizer_path == folder
    assert opened.gguf_metadata is None
    assert opened.chat_template is None
    assert params["layers"][3]["down"].shape == (48, 32)
    assert "weights: 0." in caplog.text


def test_safetensors_are_cached_only_where_a_folder_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder / "home"))
    open_model(ModelOptions(str(folder))).load("float32")
    assert not (folder / "home").exists()
    options = ModelOptions(str(folder), weight_cache_dir=str(folder / "cache"))
    first = open_model(options).load("float32")
    monkeypatch.setattr("jaxserve.weights.load.load_params", lambda *args: pytest.fail("weights were converted again"))
    again = open_model(options).load("float32")
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True))


def test_gguf_with_and_without_a_tokenizer_beside_it(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", tiny_model("qwen2"), "qwen2")
    opened = open_model(ModelOptions(str(tmp_path), weight_cache_dir="off"))
    assert opened.tokenizer_path is None
    assert opened.gguf_metadata is not None
    assert opened.gguf_metadata["general.architecture"] == "qwen2"
    (tmp_path / "tokenizer.json").write_text("{}")
    assert open_model(ModelOptions(str(tmp_path))).tokenizer_path == tmp_path


def test_tokenizer_and_template_of_ones_own(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("tokenizer")
    (other / "mine.jinja").write_text("{{ messages }}")
    options = ModelOptions(str(folder), tokenizer=str(other), chat_template=str(other / "mine.jinja"))
    opened = open_model(options)
    assert opened.tokenizer_path == other
    assert opened.chat_template == "{{ messages }}"
    with pytest.raises(MissingFileError, match=r"none\.jinja"):
        open_model(ModelOptions(str(folder), chat_template="none.jinja"))
    (other / "bytes.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(CorruptFileError, match=r"bytes\.jinja cannot be read: it is no UTF-8 text"):
        open_model(ModelOptions(str(folder), chat_template=str(other / "bytes.jinja")))
    with pytest.raises(ConfigError, match=r"^revision 'main' has no effect"):
        open_model(ModelOptions(str(folder), revision="main"))


def test_broken_settings_are_named(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(CorruptFileError, match=r"config\.json is not valid JSON"):
        open_model(ModelOptions(str(folder)))


def test_settings_of_another_size_are_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 95}))
    with pytest.raises(ShapeMismatchError, match=r"embed_tokens\.weight has shape \[96, 32\].*\[95, 32\]"):
        open_model(ModelOptions(str(folder))).load("float32")


def test_dummy_weights_need_only_settings(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    opened = open_model(ModelOptions(str(folder), load_format="dummy", seed=1))
    params = opened.load("bfloat16")
    assert jax.tree.map(lambda a: a.shape, params) == jax.tree.map(lambda s: s.shape, opened.specs)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"bfloat16"}


@pytest.mark.parametrize(("quantization", "stored"), [("none", "float32"), ("int8", "int8"), ("gguf", "int4")])
def test_dummy_weights_take_every_form(quantization: str, stored: str, folder: Path) -> None:
    opened = open_model(ModelOptions(str(folder), load_format="dummy", seed=1))
    params = opened.load("float32", form=WeightForm(quantization, packed=True))
    layer, plain = params["layers"][0], opened.load("float32")["layers"][0]
    assert layer["qkv"].kind == stored
    assert layer["down"].kind == "float32"  # its 48 inputs are no whole groups
    np.testing.assert_allclose(unpack(layer["qkv"].weight), plain["qkv"], atol=0.06)
    assert params["lm_head"].weight.shape == (32, 96)


def test_dummy_weights_have_the_scale_of_trained_ones_and_follow_the_seed() -> None:
    config = ModelConfig(
        "llama", 512, 64, 128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, max_position=128, qkv_bias=True
    )
    specs = param_specs(config, "hf")
    params = init_random(specs, "float32", seed=3)
    layer = params["layers"][0]
    assert np.all(np.asarray(layer["input_norm"]) == 1)
    assert np.all(np.asarray(layer["qkv_bias"]) == 0)
    x = np.random.default_rng(0).standard_normal((64, 64), np.float32)
    for name in ("qkv", "gate_up"):
        assert 0.8 < (x @ np.asarray(layer[name])).std() < 1.2
    assert 0.8 < (x @ np.asarray(params["lm_head"]).T).std() < 1.2
    assert not np.array_equal(layer["qkv"], params["layers"][1]["qkv"])
    again, other = init_random(specs, "float32", seed=3), init_random(specs, "float32", seed=4)
    np.testing.assert_array_equal(again["embed"], params["embed"])
    assert not np.array_equal(other["embed"], params["embed"])
