"""EAGLE heads on disk: as their authors publish them, as ours are saved, and refused with the reason."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from jaxserve.errors import LoadError
from jaxserve.speculative import EagleHead, eagle_specs
from jaxserve.weights import is_eagle, is_medusa, load_params, open_eagle, save_eagle
from tests.equivalence.harness import MODEL
from tests.equivalence.heads import HEADS, F, checkpoint, proposer_params

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": MODEL.vocab_size,
    "hidden_size": MODEL.hidden_size,
    "intermediate_size": F,
    "num_hidden_layers": 1,
    "num_attention_heads": MODEL.num_heads,
    "num_key_value_heads": MODEL.num_kv_heads,
    "head_dim": MODEL.head_dim,
    "max_position_embeddings": 64,
    "rms_norm_eps": MODEL.rms_eps,
}
CONFIG_3 = CONFIG | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 40}


def write(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any], *, pickled: bool = False) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("pickled", [True, False], ids=["bin", "safetensors"])
@pytest.mark.parametrize(("kind", "config"), [("EAGLE", CONFIG), ("EAGLE-3", CONFIG_3)])
def test_the_authors_folders_load_as_they_are(tmp_path: Path, kind: str, config: dict[str, Any], pickled: bool) -> None:
    folder = write(tmp_path / "head", checkpoint(kind), config, pickled=pickled)
    assert is_eagle(str(folder))
    assert not is_medusa(str(folder))
    files = open_eagle(str(folder))
    head = HEADS[kind]
    assert (files.is_fused, files.has_bias, files.taps) == (bool(head.taps), head.has_bias, None)
    assert files.layer.head_dim == head.layer.head_dim
    expected = proposer_params(head)
    if kind == "EAGLE-3":
        np.testing.assert_array_equal(files.vocabulary, expected["vocabulary"])
    else:
        assert files.vocabulary is None
    count = MODEL.vocab_size if files.vocabulary is None else len(files.vocabulary)
    loaded = load_params(eagle_specs(head, count), files.reader, "float32")
    np.testing.assert_array_equal(loaded["layer"]["qkv"], expected["layer"]["qkv"])
    np.testing.assert_array_equal(loaded["fc"], expected["fc"])


def test_layers_that_a_head_names_are_read(tmp_path: Path) -> None:
    config = CONFIG_3 | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 0, 1]}}
    assert open_eagle(str(write(tmp_path / "head", checkpoint("EAGLE-3"), config))).taps == (1, 0, 1)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    head = EagleHead(replace(HEADS["EAGLE"].layer, rope_theta=5e4))
    rng = np.random.default_rng(4)
    specs = eagle_specs(head, 0)
    params = {
        "fc": rng.standard_normal(specs["fc"].shape).astype(np.float32),
        "layer": {name: rng.standard_normal(spec.shape).astype(np.float32) for name, spec in specs["layer"].items()},
    }
    save_eagle(tmp_path, params, head.layer, np.array([3, 5, 8], np.int32), {"note": 1})
    files = open_eagle(str(tmp_path))
    assert is_eagle(str(tmp_path))
    assert files.vocabulary is not None
    assert files.vocabulary.tolist() == [3, 5, 8]
    assert (files.layer.rope_theta, files.is_fused, files.has_bias) == (5e4, False, False)
    loaded = load_params(eagle_specs(EagleHead(files.layer), 3), files.reader, "float32")
    np.testing.assert_array_equal(loaded["fc"], params["fc"])
    assert loaded["layer"].keys() == params["layer"].keys()
    for name, array in params["layer"].items():
        np.testing.assert_array_equal(loaded["layer"][name], array)


def without(tensors: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        (without(checkpoint("EAGLE"), "fc.weight"), CONFIG, "holds no EAGLE head"),
        (checkpoint("EAGLE"), CONFIG | {"num_hidden_layers": 2}, "holds no EAGLE head"),
        (checkpoint("EAGLE"), CONFIG | {"architectures": ["Strange"]}, "architecture .Strange. is not served"),
        (checkpoint("EAGLE"), CONFIG | {"eagle_vocabulary": [1, -1]}, "eagle_vocabulary must be a list of token ids"),
        (checkpoint("EAGLE-3") | {"d2t": torch.full((40,), 30)}, CONFIG_3, "d2t does not lead to distinct tokens"),
        (checkpoint("EAGLE-3") | {"d2t": torch.zeros(40)}, CONFIG_3, "d2t"),
        (
            checkpoint("EAGLE-3"),
            CONFIG_3 | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ["a"]}},
            "eagle_aux_hidden_state_layer_ids must be a list of layers",
        ),
    ],
    ids=["no fc", "two layers", "family", "vocabulary", "d2t", "kind of d2t", "taps"],
)
def test_heads_that_cannot_work_are_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any], message: str
) -> None:
    with pytest.raises(LoadError, match=message):
        open_eagle(str(write(tmp_path / "head", tensors, config)))


def test_folders_of_other_things_are_no_heads(tmp_path: Path) -> None:
    assert not is_eagle(str(tmp_path))
    assert not is_eagle(str(write(tmp_path / "model", without(checkpoint("EAGLE"), "fc.weight"), CONFIG)))
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(LoadError, match=r"no \.safetensors file and no pytorch_model\.bin"):
        open_eagle(str(tmp_path / "empty"))
