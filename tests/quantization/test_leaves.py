"""Leaves made from checkpoints: which they become, whether they hold the model's values, and what they compute."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from numpy.typing import NDArray

from jaxserve.config import ModelOptions
from jaxserve.errors import LoadError
from jaxserve.models import ModelConfig, ParamSpec, Use, param_specs
from jaxserve.quantization import PackedLeaf, WeightForm, describe
from jaxserve.weights import OpenedModel, Params, init_random, open_model
from pallas_kernels.packed_matmul import unpack
from tests.models.dense import all_logits
from tests.weights.checkpoints import tiny_model, write_gguf

FLOATS, PACKED = WeightForm(), WeightForm(packed=True)
INT8, GGUF = WeightForm("int8"), WeightForm("gguf")
TOKENS = np.random.default_rng(5).integers(0, 96, 40).tolist()


def is_leaf(value: Any) -> bool:
    return isinstance(value, PackedLeaf)


def values(params: Params, specs: Any) -> list[NDArray[Any]]:
    """The parameters as plain arrays of the shapes of their specs."""

    def plain(leaf: Any, spec: ParamSpec) -> NDArray[Any]:
        if not is_leaf(leaf):
            return np.asarray(leaf)
        whole = np.asarray(unpack(leaf.weight))
        return whole.T if spec.use is Use.LOGITS else whole

    return jax.tree.leaves(jax.tree.map(plain, params, specs, is_leaf=is_leaf))


def assert_holds(params: Params, floats: Params, specs: Any) -> None:
    for a, b in zip(values(params, specs), jax.tree.leaves(floats), strict=True):
        np.testing.assert_array_equal(a, np.asarray(b))


def kinds(params: Params) -> dict[str, str]:
    """How each leaf of layer 0 and of the root is stored."""
    named = {**params["layers"][0], **{k: v for k, v in params.items() if k != "layers"}}
    return {name: leaf.kind if is_leaf(leaf) else f"plain {leaf.dtype.name}" for name, leaf in named.items()}


def written(folder: Path, kind_of: Callable[[str], str], **more: Any) -> OpenedModel:
    sizes = {"intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16, **more}
    write_gguf(folder / "model.gguf", tiny_model("llama", **sizes), "llama", kind_of=kind_of)
    return open_model(ModelOptions(str(folder / "model.gguf"), weight_cache_dir="off"))


def config(**more: Any) -> ModelConfig:
    sizes = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "max_position": 96}
    sizes = {"windows": (None, None), "rope_layers": (True, True), **sizes, **more}
    return ModelConfig("llama", 96, 32, 64, **sizes)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("tied", [False, True])
def test_kept_blocks_are_the_floats_that_they_expand_to(kind: str, tied: bool, tmp_path: Path) -> None:
    opened = written(tmp_path, lambda name: kind, tie_word_embeddings=tied)
    assert opened.kept_kinds == (kind,)
    params = opened.load("float32", form=GGUF)
    assert_holds(params, opened.load("float32"), opened.specs)
    stored = "int4" if "4" in kind else "int8"
    found = kinds(params)
    assert {found[name] for name in ("qkv", "o", "gate_up", "down")} == {stored}
    assert found["input_norm"] == found["final_norm"] == "plain float32"
    # Only looked up, a table is no factor of a product.
    assert (found["embed"], found.get("lm_head")) == ((stored, None) if tied else ("plain float32", stored))


def test_unlike_parts_are_merged_and_what_cannot_be_kept_is_floats(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mixed = {"attn_q": "Q4_0", "attn_k": "Q4_1", "attn_v": "Q8_0", "ffn_gate": "Q4_1", "ffn_up": "F16", "output": "F32"}
    opened = written(tmp_path, lambda name: mixed.get(name.split(".")[-2], "Q4_0"))
    with caplog.at_level(logging.INFO, "jaxserve"):
        params = opened.load("bfloat16", form=GGUF)
    assert {name: kind for name, kind in kinds(params).items() if "norm" not in name} == {
        "qkv": "int8",
        "o": "int4",
        "gate_up": "plain bfloat16",
        "down": "int4",
        "embed": "plain bfloat16",
        "lm_head": "plain bfloat16",
    }
    assert "3 of 9 matrices cannot be quantised and are bfloat16 (3 for floats)" in caplog.text
    exact = opened.load("float32", form=GGUF)
    assert_holds(exact, opened.load("float32"), opened.specs)
    assert describe(params).count("packed int4") == 1


def test_int8_of_a_checkpoint_is_made_from_its_own_values(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not from values rounded to the engine's dtype first; rows that fill no groups stay floats."""
    tiny_model("llama").save_pretrained(tmp_path)
    opened = open_model(ModelOptions(str(tmp_path)))
    with caplog.at_level(logging.INFO, "jaxserve"):
        params = opened.load("bfloat16", form=INT8)
    assert "4 of 17 matrices cannot be quantised and are bfloat16 (4 for inputs no multiple of 32)" in caplog.text
    assert kinds(params)["down"] == "plain bfloat16"
    wide = opened.load("float32", form=INT8)
    for name in ("qkv", "o", "gate_up"):
        a, b = (tree["layers"][0][name].weight for tree in (params, wide))
        np.testing.assert_array_equal(np.asarray(a.data), np.asarray(b.data))
        exact = np.asarray(opened.load("float32")["layers"][0][name])
        assert np.abs(np.asarray(unpack(a)) - exact).max() <= np.asarray(a.scale).max() / 2


def test_a_weight_that_int8_cannot_hold_is_named(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.model.layers[1].self_attn.o_proj.weight.data[3, 4] = 1e8
    model.save_pretrained(tmp_path)
    with pytest.raises(LoadError, match=r"model\.layers\.1\.self_attn\.o_proj\.weight"):
        open_model(ModelOptions(str(tmp_path))).load("float32", form=INT8)


@pytest.mark.parametrize(("dtype", "tied"), [("float32", False), ("float32", True), ("bfloat16", True)])
def test_packed_floats_give_the_logits_of_plain_ones(dtype: str, tied: bool) -> None:
    model = config(tie_embeddings=tied)
    specs = param_specs(model, "hf")
    plain, packed = (init_random(specs, dtype, 3, form=form) for form in (FLOATS, PACKED))
    assert_holds(packed, plain, specs)
    assert packed["embed"].dtype == plain["embed"].dtype
    want = all_logits(plain, model, TOKENS)
    assert np.abs(want).max() > 1
    np.testing.assert_allclose(all_logits(packed, model, TOKENS), want, atol=1e-5 if dtype == "float32" else 0.05)


@pytest.mark.parametrize(("form", "most"), [(INT8, 0.04), (GGUF, 0.5)], ids=["int8", "4 bits"])
def test_quantised_random_weights_give_logits_near_those_of_floats(form: WeightForm, most: float) -> None:
    """Logits of random weights are spread by 1; the tolerances of the error's spread are about twice what was found."""
    model = config(tie_embeddings=True)
    specs = param_specs(model, "hf")
    want = all_logits(init_random(specs, "float32", 3), model, TOKENS)
    got = all_logits(init_random(specs, "float32", 3, form=form), model, TOKENS)
    assert 0.9 < want.std() < 1.1
    assert most / 4 < (got - want).std() < most


def test_kept_blocks_give_the_logits_of_packed_floats_of_their_values(tmp_path: Path) -> None:
    opened = written(tmp_path, lambda name: "Q8_0" if "embd" in name else "Q4_1", tie_word_embeddings=True)
    want = all_logits(opened.load("float32", form=PACKED), opened.config, TOKENS)
    got = all_logits(opened.load("float32", form=GGUF), opened.config, TOKENS)
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


def test_only_float_leaves_use_the_cache_of_converted_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = written(tmp_path, lambda name: "Q4_1")
    cached = open_model(ModelOptions(str(tmp_path / "model.gguf"), weight_cache_dir=str(tmp_path / "cache")))
    for form in (GGUF, INT8):
        cached.load("float32", form=form)
    assert not (tmp_path / "cache").exists()
    first = cached.load("float32", form=PACKED)
    monkeypatch.setattr("jaxserve.weights.load.load_host", lambda *args: pytest.fail("weights were converted again"))
    for params in (first, cached.load("float32", form=PACKED)):
        assert kinds(params)["qkv"] == "float32"
        assert_holds(params, opened.load("float32"), opened.specs)
