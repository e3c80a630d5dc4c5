"""Safetensors folders that are incomplete or broken fail with the name of what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.errors import CorruptFileError, MissingFileError, UnsupportedModelError
from jaxserve.weights.safetensors import INDEX, SafetensorsReader, has_safetensors

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards and their index."""
    save_file({"a": np.arange(6, dtype=np.float32).reshape(2, 3)}, tmp_path / FIRST)
    save_file({"b": np.arange(4, dtype=np.float16), "c": np.arange(2)}, tmp_path / SECOND)
    index = {"metadata": {}, "weight_map": {"a": FIRST, "b": SECOND, "c": SECOND}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    return tmp_path


def test_reads_across_shards(folder: Path) -> None:
    reader = SafetensorsReader(folder)
    assert reader.shapes == {"a": (2, 3), "b": (4,), "c": (2,)}
    assert [path.name for path in reader.files] == [FIRST, SECOND]
    for _ in range(2):  # back and forth between shards
        np.testing.assert_array_equal(reader.read("a"), np.arange(6).reshape(2, 3))
        np.testing.assert_array_equal(reader.read("b"), np.arange(4))
    assert reader.dtype("b") == "float16"


def test_what_was_read_outlives_the_file(folder: Path) -> None:
    reader = SafetensorsReader(folder)
    tensor = reader.read("a")
    reader.read("b")
    (folder / FIRST).write_bytes(b"")
    np.testing.assert_array_equal(tensor, np.arange(6).reshape(2, 3))


def test_a_shard_that_is_not_there_is_named(folder: Path) -> None:
    (folder / SECOND).unlink()
    with pytest.raises(MissingFileError, match=SECOND):
        SafetensorsReader(folder)


@pytest.mark.parametrize("keep", [0, 5, 30, -3])
def test_a_truncated_file_is_named(folder: Path, keep: int) -> None:
    (folder / FIRST).write_bytes((folder / FIRST).read_bytes()[:keep])
    with pytest.raises(CorruptFileError, match=FIRST):
        SafetensorsReader(folder)


def test_a_file_of_another_kind_is_named(folder: Path) -> None:
    (folder / FIRST).write_text("<html>404</html>" * 10)
    with pytest.raises(CorruptFileError, match=FIRST):
        SafetensorsReader(folder)


def test_an_index_that_places_a_tensor_wrongly(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": FIRST, "x": SECOND}}))
    with pytest.raises(CorruptFileError, match=f"places x in {SECOND}"):
        SafetensorsReader(folder)


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "../a"}}']
)
def test_a_broken_index(folder: Path, text: str) -> None:
    (folder / INDEX).write_text(text)
    with pytest.raises(CorruptFileError, match=INDEX):
        SafetensorsReader(folder)


def test_integers_are_no_weights(folder: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="c is stored as I64"):
        SafetensorsReader(folder).read("c")


def test_pytorch_files_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(MissingFileError, match=r"\.bin"):
        SafetensorsReader(tmp_path)


def test_doubled_and_foreign_files_are_left_out(tmp_path: Path) -> None:
    save_file({"x": np.zeros(1, np.float32)}, tmp_path / "consolidated.safetensors")
    save_file({"y": np.zeros(1, np.float32)}, tmp_path / "adapter_model.safetensors")
    assert not has_safetensors(tmp_path)
    save_file({"a": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    assert has_safetensors(tmp_path)
    assert set(SafetensorsReader(tmp_path).shapes) == {"a"}
