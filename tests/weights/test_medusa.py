"""Medusa heads on disk: written and read back, as torch saves them, and refused with the reason."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from jaxserve.config import ModelOptions
from jaxserve.engine.loading import load_heads
from jaxserve.errors import LoadError
from jaxserve.speculative import head_logits
from jaxserve.weights import default_drafts, is_medusa, open_medusa, save_medusa
from jaxserve.weights.torch_file import TorchFile

HIDDEN, TOKENS = 32, 64
CONFIG = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "some/model"}


class ResBlock(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.nn.functional.silu(self.linear(x))


def authors_heads() -> torch.nn.ModuleList:
    """Heads as the authors make them."""
    torch.manual_seed(1)
    return torch.nn.ModuleList(
        torch.nn.Sequential(ResBlock(), torch.nn.Linear(HIDDEN, TOKENS, bias=False)) for _ in range(2)
    )


def write_torch(folder: Path, dtype: torch.dtype = torch.float32, **config: Any) -> torch.nn.ModuleList:
    heads = authors_heads().to(dtype)
    torch.save(heads.state_dict(), folder / "medusa_lm_head.pt")
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    return heads


def test_a_checkpoint_of_the_authors_computes_what_it_does_in_torch(tmp_path: Path) -> None:
    heads = write_torch(tmp_path)
    opened = open_medusa(str(tmp_path))
    assert (opened.num_heads, opened.num_layers, opened.base_model) == (2, 1, "some/model")
    assert opened.paths == ((0,), (0, 0))
    params = load_heads(ModelOptions(quantization="none"), opened, (HIDDEN, TOKENS), {}, jnp.dtype("float32"))
    x = np.random.default_rng(0).standard_normal((3, HIDDEN)).astype(np.float32)
    for ours, theirs in zip(params["heads"], heads, strict=True):
        np.testing.assert_allclose(head_logits(ours, x), theirs(torch.tensor(x)).detach().numpy(), atol=1e-4)


@pytest.mark.parametrize("vocabulary", [None, [3, 60, 7]])
def test_heads_of_residual_blocks_alone_use_the_head_of_the_model(vocabulary: list[int] | None, tmp_path: Path) -> None:
    heads = authors_heads()
    blocks = {name: tensor for name, tensor in heads.state_dict().items() if ".linear." in name}
    torch.save(blocks, tmp_path / "medusa_lm_head.pt")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"medusa_vocabulary": vocabulary}))
    random = np.random.default_rng(0)
    table, x = random.standard_normal((TOKENS, HIDDEN)).astype(np.float32), random.standard_normal((3, HIDDEN))
    options = ModelOptions(quantization="none")
    model = {"embed": np.zeros_like(table), "lm_head": jnp.asarray(table)}
    params = load_heads(options, open_medusa(str(tmp_path)), (HIDDEN, TOKENS), model, jnp.dtype("float32"))
    known = table if vocabulary is None else table[vocabulary]
    for ours, theirs in zip(params["heads"], heads, strict=True):
        wanted = theirs[0](torch.tensor(x, dtype=torch.float32)).detach().numpy() @ known.T
        np.testing.assert_allclose(head_logits(ours, x.astype(np.float32)), wanted, atol=1e-4)


def test_heads_with_a_table_missing_are_refused(tmp_path: Path) -> None:
    tensors = authors_heads().state_dict()
    del tensors["0.1.weight"]
    torch.save(tensors, tmp_path / "medusa_lm_head.pt")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    heads = open_medusa(str(tmp_path))
    with pytest.raises(LoadError, match=r"0\.1\.weight"):
        load_heads(ModelOptions(quantization="none"), heads, (HIDDEN, TOKENS), {}, jnp.dtype("float32"))


def test_what_is_saved_is_read_back(tmp_path: Path) -> None:
    write_torch(tmp_path)
    opened = open_medusa(str(tmp_path))
    names = opened.reader.shapes
    heads = [
        {
            "blocks": [
                {
                    "weight": opened.reader.read(f"{i}.0.linear.weight").T,
                    "bias": opened.reader.read(f"{i}.0.linear.bias"),
                }
            ],
            "out": opened.reader.read(f"{i}.1.weight"),
        }
        for i in range(2)
    ]
    vocabulary = np.arange(5, 5 + TOKENS, dtype=np.int32)
    save_medusa(tmp_path / "ours", heads, "some/model", vocabulary, {"medusa_choices": [[0], [1], [0, 0]]})
    tensors = load_file(tmp_path / "ours" / "medusa_lm_head.safetensors")
    assert tensors.keys() == names.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(tensor, opened.reader.read(name))
    again = open_medusa(str(tmp_path / "ours"))
    np.testing.assert_array_equal(again.vocabulary, vocabulary)
    assert again.paths == ((0,), (1,), (0, 0))
    assert is_medusa(str(tmp_path / "ours"))
    assert not is_medusa("smollm2-135m")
    assert not is_medusa(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_torch_files_of_other_floats_and_layouts(tmp_path: Path, dtype: torch.dtype) -> None:
    whole = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    state = OrderedDict(whole=whole, part=whole[2:4, 1:5].T, parameter=torch.nn.Parameter(whole[0]))
    torch.save(state, tmp_path / "x.pt")
    file = TorchFile(tmp_path / "x.pt")
    assert file.shapes == {name: tuple(tensor.shape) for name, tensor in state.items()}
    for name, tensor in state.items():
        assert file.dtype(name) == str(dtype).removeprefix("torch.")
        np.testing.assert_array_equal(file.read(name).astype(np.float32), tensor.detach().float().numpy())


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise SystemExit('it was run')",)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (OrderedDict(a=Evil()), "it refers to __builtin__.exec"),
        (OrderedDict(a=torch.zeros(2, dtype=torch.complex64)), "it refers to torch.ComplexFloatStorage"),
        (OrderedDict(a=3), "must hold tensors by name"),
        ([torch.zeros(2)], "must hold tensors by name"),
    ],
    ids=["evil", "complex", "number", "list"],
)
def test_torch_files_are_not_run(tmp_path: Path, state: Any, message: str) -> None:
    torch.save(state, tmp_path / "x.pt")
    with pytest.raises(LoadError, match=message):
        TorchFile(tmp_path / "x.pt")


def test_damaged_torch_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(LoadError, match=r"x\.pt is no complete file of torch\.save"):
        TorchFile(path)
    torch.save(OrderedDict(a=torch.zeros(4)), tmp_path / "whole.pt")
    with zipfile.ZipFile(tmp_path / "whole.pt") as whole, zipfile.ZipFile(path, "w") as cut:
        for name in whole.namelist():
            cut.writestr(name, whole.read(name)[:8] if name.endswith("data/0") else whole.read(name))
    with pytest.raises(LoadError, match="a reaches beyond its values"):
        TorchFile(path).read("a")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"medusa_num_heads": 0}, "medusa_num_heads must be an integer from 1 to 64, got 0"),
        ({"medusa_num_layers": "1"}, "medusa_num_layers must be an integer from 0 to 16, got '1'"),
        ({"medusa_vocabulary": [1, -2]}, "medusa_vocabulary must be a list of token ids"),
        ({"medusa_choices": [[0], [1, 0]]}, r"medusa_choices .*; \[1, 0\] is not"),
        ({"medusa_choices": [[0], [0, 0], [0, 0, 0]]}, r"up to 2 ranks .*; \[0, 0, 0\] is not"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    write_torch(tmp_path, **config)
    with pytest.raises(LoadError, match=message):
        open_medusa(str(tmp_path))


def test_heads_without_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(LoadError, match=r"no medusa_lm_head.safetensors or medusa_lm_head.pt in"):
        open_medusa(str(tmp_path))


def test_the_default_place_tells_models_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_drafts("medusa", "smollm2-135m") == tmp_path / "jaxserve" / "drafts" / "medusa" / "smollm2-135m"
    assert default_drafts("medusa", "owner/name").name == "owner--name"
    for folder in ("a", "b"):
        (tmp_path / folder / "model").mkdir(parents=True)
    one, other = (default_drafts("medusa", str(tmp_path / folder / "model")) for folder in ("a", "b"))
    assert one != other
    assert one.name.startswith("model-")
