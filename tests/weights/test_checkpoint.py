"""The cache of converted weights: it saves the conversion, and never gets in the way."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.config import ModelOptions
from jaxserve.weights import GGUFFile, OpenedModel, Params, open_model
from jaxserve.weights.checkpoint import WeightCache, default_root
from tests.weights.checkpoints import tiny_model, write_gguf


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    write_gguf(path, tiny_model("llama"), "llama")
    return path


@pytest.fixture
def gguf(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(source, tmp_path / "model.gguf"))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the tensors that are read from a GGUF file."""
    names: list[str] = []
    read = GGUFFile.read

    def spy(self: GGUFFile, name: str) -> np.ndarray[Any, np.dtype[Any]]:
        names.append(name)
        return read(self, name)

    monkeypatch.setattr(GGUFFile, "read", spy)
    return names


def opened(gguf: Path, root: Path | str) -> OpenedModel:
    return open_model(ModelOptions(str(gguf), weight_cache_dir=str(root)))


def assert_equal(first: Params, second: Params) -> None:
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_second_load_converts_nothing(dtype: str, gguf: Path, tmp_path: Path, reads: list[str]) -> None:
    first = opened(gguf, tmp_path / "cache").load(dtype)
    assert len(reads) > 0
    reads.clear()
    second = opened(gguf, tmp_path / "cache").load(dtype)
    assert reads == []
    assert_equal(first, second)
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_placing_gets_the_specs_of_cached_weights_too(gguf: Path, tmp_path: Path) -> None:
    opened(gguf, tmp_path / "cache").load("float32")
    model = opened(gguf, tmp_path / "cache")
    seen: list[bool] = []

    def place(array: np.ndarray[Any, np.dtype[Any]], spec: Any) -> jax.Array:
        seen.append(array.shape == spec.shape)
        return jax.device_put(array)

    model.load("float32", place)
    assert len(seen) == len(jax.tree.leaves(model.specs))
    assert all(seen)


def test_off_keeps_nothing(gguf: Path, tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    for _ in range(2):
        reads.clear()
        opened(gguf, "off").load("float32")
        assert len(reads) > 0
    assert not (tmp_path / "home").exists()


def test_the_default_folder(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    open_model(ModelOptions(str(gguf))).load("float32")
    assert default_root() == tmp_path / "home" / "jaxserve" / "weights"
    assert len(list(default_root().iterdir())) == 1


def test_the_name_does_not_matter_but_one_bit_of_content_does(gguf: Path, tmp_path: Path) -> None:
    cache = WeightCache(tmp_path / "cache")
    specs = opened(gguf, "off").specs
    other = Path(shutil.copy(gguf, tmp_path / "other.gguf"))
    key = cache.key([gguf], specs, "float32")
    assert cache.key([other], specs, "float32") == key
    content = bytearray(gguf.read_bytes())
    content[len(content) // 2] ^= 1
    stat = gguf.stat()
    other.write_bytes(content)
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # neither time nor size tells of the change
    assert cache.key([other], specs, "float32") != key
    assert cache.key([gguf], specs, "bfloat16") != key
    assert cache.key([gguf], {**specs, "lm_head": specs["embed"]}, "float32") != key


def damage_data(entry: Path) -> None:
    largest = max((p for p in entry.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)


def damage_length(entry: Path) -> None:
    largest = max((p for p in entry.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-10])


def damage_files(entry: Path) -> None:
    shutil.rmtree(entry / "params")


def damage_manifest(entry: Path) -> None:
    (entry / "manifest.json").write_text("{}")


def damage_all(entry: Path) -> None:
    shutil.rmtree(entry)
    entry.mkdir()


@pytest.mark.parametrize("damage", [damage_data, damage_length, damage_files, damage_manifest, damage_all])
def test_a_damaged_entry_is_made_anew(
    damage: Any, gguf: Path, tmp_path: Path, reads: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    first = opened(gguf, tmp_path / "cache").load("float32")
    (entry,) = (tmp_path / "cache").iterdir()
    damage(entry)
    reads.clear()
    with caplog.at_level(logging.WARNING, "jaxserve"):
        assert_equal(opened(gguf, tmp_path / "cache").load("float32"), first)
    assert "are damaged and are made anew" in caplog.text
    assert len(reads) > 0
    reads.clear()
    assert_equal(opened(gguf, tmp_path / "cache").load("float32"), first)
    assert reads == []


def test_a_crash_while_writing_leaves_no_entry(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", crash)
    with pytest.raises(KeyboardInterrupt):
        opened(gguf, tmp_path / "cache").load("float32")
    assert list((tmp_path / "cache").iterdir()) == []


def test_leftovers_of_killed_processes_are_swept(gguf: Path, tmp_path: Path) -> None:
    old, new = (tmp_path / "cache" / f".unfinished-{name}" for name in ("old", "new"))
    for folder in (old, new):
        folder.mkdir(parents=True)
    os.utime(old, (0, 0))
    opened(gguf, tmp_path / "cache").load("float32")
    assert not old.exists()
    assert new.exists()


def test_a_folder_that_cannot_be_made_is_a_warning(
    gguf: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING, "jaxserve"):
        params = opened(gguf, tmp_path / "file" / "cache").load("float32")
    assert params["embed"].shape == (96, 32)
    assert "not cached" in caplog.text


def test_a_full_disk_is_a_warning(
    gguf: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 90, 10))
    with caplog.at_level(logging.WARNING, "jaxserve"):
        opened(gguf, tmp_path / "cache").load("float32")
    assert "MiB free" in caplog.text
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_disk_that_fills_while_writing_is_a_warning(
    gguf: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, data: str, **options: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with caplog.at_level(logging.WARNING, "jaxserve"):
        opened(gguf, tmp_path / "cache").load("float32")
    assert "No space left" in caplog.text
    assert list((tmp_path / "cache").iterdir()) == []
