"""Reading PEFT's files: what is served becomes factors, everything else is refused with its reason."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from torch._utils import _rebuild_tensor_v2

from jaxserve.errors import LoadError
from jaxserve.lora.adapter import find_adapter, read_adapter
from jaxserve.lora.layout import Layout
from jaxserve.models import from_hf
from jaxserve.weights.safetensors import SafetensorsCopy
from tests.lora.adapters import ALL, base_model, edit_config, make_adapter

WEIGHTS = "adapter_model.safetensors"


def layout(**changes: Any) -> Layout:
    model = from_hf({**base_model().config.to_dict(), "architectures": ["LlamaForCausalLM"]})
    return Layout(model, **{"max_rank": 8, "dtype": np.dtype(np.float32), **changes})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_adapter(tmp_path / "a", 1)


def tensors(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change what the adapter's file holds."""
    held = load_file(folder / WEIGHTS)
    change(held)
    save_file(held, folder / WEIGHTS)


def test_factors_are_those_of_the_file_and_the_scale(folder: Path) -> None:
    adapter = read_adapter(find_adapter(str(folder)), layout())
    assert adapter.targets == ("down", "gate", "k", "o", "q", "up", "v")
    assert adapter.rank == 4
    assert len(adapter.factors) == 2 * len(ALL)
    held = load_file(folder / WEIGHTS)
    stem = "base_model.model.model.layers.1.mlp.up_proj.lora_"
    up = adapter.factors[1, "up"]
    np.testing.assert_array_equal(up.a, held[f"{stem}A.weight"])
    np.testing.assert_array_equal(up.b, 2 * held[f"{stem}B.weight"].T)  # alpha 8, rank 4


def test_slots_may_have_room_for_some_projections_only(folder: Path, tmp_path: Path) -> None:
    narrow = layout(targets=("q", "v"))
    assert list(narrow.products) == ["qkv"]
    assert narrow.slot_bytes < layout().slot_bytes / 2
    with pytest.raises(LoadError, match=r"slots have room for q_proj, v_proj, .* only \(--lora-target-modules\)"):
        read_adapter(folder, narrow)
    held = make_adapter(tmp_path / "narrow", 3, targets=["v_proj", "q_proj"])
    assert read_adapter(held, narrow).targets == ("q", "v")


def test_the_key_is_of_the_content(folder: Path, tmp_path: Path) -> None:
    key = read_adapter(folder, layout()).key
    same = make_adapter(tmp_path / "b", 1)
    assert read_adapter(same, layout()).key == key
    edit_config(same, lora_alpha=9)
    assert read_adapter(same, layout()).key != key
    assert read_adapter(make_adapter(tmp_path / "c", 3), layout()).key != key


def test_how_the_base_weight_is_stored_is_no_matter(folder: Path) -> None:
    expected = read_adapter(folder, layout()).factors
    edit_config(folder, fan_in_fan_out=True)
    found = read_adapter(folder, layout()).factors
    assert found.keys() == expected.keys()
    for place, own in found.items():
        np.testing.assert_array_equal(own.a, expected[place].a)
        np.testing.assert_array_equal(own.b, expected[place].b)


def test_pieces_hold_every_factor_at_its_place(folder: Path) -> None:
    where = layout()
    adapter = read_adapter(folder, where)
    (piece,) = where.pieces(dict(adapter.factors))
    a, b, ranks = piece.products["qkv"]
    assert (a.shape, b.shape, ranks.tolist()) == ((2, 3 * 8, 32), (2, 8, 64), [[4, 4, 4]] * 2)
    np.testing.assert_array_equal(a[1, 8:12], adapter.factors[1, "k"].a)
    np.testing.assert_array_equal(b[1, :4, 32:48], adapter.factors[1, "k"].b)
    assert not a[1, 12:16].any()
    assert not b[1, 4:].any()


CONFIGS = {
    "use_dora": (True, "DoRA"),
    "bias": ("all", "bias must be 'none'"),
    "modules_to_save": (["lm_head"], "modules_to_save"),
    "layer_replication": ([[0, 2]], "layer_replication"),
    "trainable_token_indices": ([1], "trainable_token_indices"),
    "target_parameters": (["experts.up"], "target_parameters"),
    "lora_bias": (True, "lora_bias"),
    "use_something_new": (True, "use_something_new is not supported"),
    "kasa_config": ({"beta": 1}, "kasa_config is not supported"),
    "init_lora_weights": ("pissa_niter_4", "takes the adapter's start out of the base weights"),
    "peft_type": ("IA3", "peft_type must be LORA"),
    "r": (0, "r must be a positive integer, got 0"),
    "lora_alpha": ("8", "lora_alpha must be a number, got '8'"),
    "rank_pattern": ({"q_proj": 2.5}, r"rank_pattern\['q_proj'\] must be a positive integer"),
    "alpha_pattern": ({"(": 2}, "which is no pattern"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_other_kinds_of_adapters_are_refused(name: str, folder: Path) -> None:
    value, message = CONFIGS[name]
    edit_config(folder, **{name: value})
    with pytest.raises(LoadError, match=message) as caught:
        read_adapter(folder, layout())
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("r", 10**400, "r must be a positive integer"),
        ("lora_alpha", 10**400, "lora_alpha must be a number"),
        ("rank_pattern", {"(?i)q_proj": 4}, "which is no pattern"),  # as it is used, behind others
    ],
)
def test_numbers_and_patterns_that_cannot_be_used_are_refused(
    name: str, value: Any, message: str, folder: Path
) -> None:
    edit_config(folder, **{name: value})
    with pytest.raises(LoadError, match=message):
        read_adapter(folder, layout())


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_"


def dora(held: dict[str, Any]) -> None:
    held[Q + "magnitude_vector"] = np.ones(32, np.float32)


def elsewhere(held: dict[str, Any]) -> None:
    for factor in "AB":
        held[Q.replace("q_proj", "rotary") + f"{factor}.weight"] = held[Q + f"{factor}.weight"]


def too_deep(held: dict[str, Any]) -> None:
    for factor in "AB":
        held[Q.replace("layers.0", "layers.7") + f"{factor}.weight"] = held.pop(Q + f"{factor}.weight")


def alone(held: dict[str, Any]) -> None:
    del held[Q + "B.weight"]


def foreign(held: dict[str, Any]) -> None:
    held[Q + "A.weight"] = np.zeros((4, 64), np.float32)


def other_rank(held: dict[str, Any]) -> None:
    held[Q + "A.weight"] = np.zeros((5, 32), np.float32)


def not_finite(held: dict[str, Any]) -> None:
    held[Q + "B.weight"][3, 1] = np.inf


def saved(held: dict[str, Any]) -> None:
    held["base_model.model.lm_head.weight"] = np.ones((288, 32), np.float32)


def head(held: dict[str, Any]) -> None:
    held["base_model.model.lm_head.lora_A.weight"] = np.ones((4, 32), np.float32)
    held["base_model.model.lm_head.lora_B.weight"] = np.ones((288, 4), np.float32)


def empty(held: dict[str, Any]) -> None:
    held.clear()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dora, "it belongs to DoRA"),
        (elsewhere, "which is none of what it may change: q_proj, k_proj, v_proj, o_proj"),
        (too_deep, "changes layer 7, but the model has the layers 0 to 1"),
        (alone, "stands alone"),
        (foreign, r"has shape \[4, 64\], but this base model needs \[4, 32\]: the adapter was made for another one"),
        (other_rank, r"has rank 5, but adapter_config.json says 4 \(r, rank_pattern\)"),
        (not_finite, "values that are not finite in float32"),
        (saved, "weights of the base model are not replaced"),
        (head, "changes lm_head; slots have room for that with --lora-embeddings only"),
        (empty, "holds no LoRA factors"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_files_that_do_not_fit_are_refused(change: Callable[..., None], message: str, folder: Path) -> None:
    tensors(folder, change)
    with pytest.raises(LoadError, match=message):
        read_adapter(folder, layout())


def test_a_rank_above_the_limit_is_refused(folder: Path) -> None:
    with pytest.raises(LoadError, match=r"rank 4; the limit is 3 \(--max-lora-rank\)"):
        read_adapter(folder, layout(max_rank=3))


def test_files_that_are_missing_or_damaged_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="no such folder, no hub id"):
        find_adapter(str(tmp_path / "nothing"))
    with pytest.raises(LoadError, match="There is no adapter '~nobody-of-that-name/x'"):
        find_adapter("~nobody-of-that-name/x")
    with pytest.raises(LoadError, match=r"There is no adapter_config\.json"):
        find_adapter(str(tmp_path))
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])
    with pytest.raises(LoadError, match="not a complete safetensors file"):
        read_adapter(folder, layout())
    (folder / WEIGHTS).unlink()
    with pytest.raises(LoadError, match=r"no adapter_model\.safetensors or adapter_model\.bin"):
        read_adapter(folder, layout())


class Odd:
    """Pickled as a tensor whose place is no place."""

    def __init__(self, *place: Any) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return _rebuild_tensor_v2, (None, *self.place)


def test_a_damaged_pickle_is_refused(folder: Path) -> None:
    held = {name: torch.from_numpy(value) for name, value in load_file(folder / WEIGHTS).items()}
    (folder / WEIGHTS).unlink()
    for place in ((0, 7, 1, False, {}), (0, ("4",), (1,), False, {}), (0, (4,), (1,), False, {})):
        torch.save({"x.lora_A.weight": Odd(*place)}, folder / "adapter_model.bin")
        with pytest.raises(LoadError, match=r"is no complete file of torch\.save"):
            read_adapter(folder, layout())
    file = folder / "adapter_model.bin"
    torch.save(held, file)
    with zipfile.ZipFile(file) as whole, zipfile.ZipFile(folder / "packed", "w", zipfile.ZIP_DEFLATED) as packed:
        for name in whole.namelist():
            packed.writestr(name, whole.read(name))
    (values,) = (info for info in packed.infolist() if info.filename.endswith("data/0"))
    data = bytearray((folder / "packed").read_bytes())
    begin = values.header_offset + 30 + len(values.filename)
    data[begin : begin + 8] = b"\xff" * 8
    file.write_bytes(data)
    with pytest.raises(LoadError, match="cannot be read: Error -3"):
        read_adapter(folder, layout())


@pytest.mark.parametrize("change", ["truncate", "replace", "settings"])
def test_files_that_change_while_they_are_read_are_refused(
    change: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a file that shrinks does not end the process, as it does for who has mapped it."""
    other = make_adapter(tmp_path / "other", 3)
    read = SafetensorsCopy.read

    def read_late(self: SafetensorsCopy, name: str) -> Any:
        monkeypatch.undo()
        if change == "settings":
            edit_config(folder, lora_alpha=3)
        else:
            (folder / WEIGHTS).write_bytes((other / WEIGHTS).read_bytes() if change == "replace" else b"")
        return read(self, name)

    monkeypatch.setattr(SafetensorsCopy, "read", read_late)
    with pytest.raises(LoadError, match="changed while they were read: load it again"):
        read_adapter(folder, layout())


def test_a_pickle_is_read_and_never_run(folder: Path) -> None:
    expected = read_adapter(folder, layout())
    held = {name: torch.from_numpy(value) for name, value in load_file(folder / WEIGHTS).items()}
    (folder / WEIGHTS).unlink()
    torch.save(held, folder / "adapter_model.bin")
    adapter = read_adapter(folder, layout())
    for place, own in adapter.factors.items():
        np.testing.assert_array_equal(own.b, expected.factors[place].b)
    torch.save({**held, "evil": print}, folder / "adapter_model.bin")
    with pytest.raises(LoadError, match=r"it refers to builtins\.print|__builtin__\.print"):
        read_adapter(folder, layout())
