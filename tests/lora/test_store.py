"""Names, versions and host memory: what is kept, what is read again, and what is let go."""

from __future__ import annotations

import gc
import shutil
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import LoadError, ModelNotFoundError, RequestError
from jaxserve.lora.adapter import find_adapter
from jaxserve.lora.store import AdapterStore
from tests.lora.adapters import edit_config, make_adapter
from tests.lora.test_adapter import layout


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    for seed, name in enumerate("abcd"):
        make_adapter(folder / name, seed, targets=["q_proj", "down_proj"])
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "adapters"))


@pytest.fixture
def store(folder: Path) -> Iterator[AdapterStore]:
    store = AdapterStore(layout(), max_host=2, folder=folder)
    yield store
    store.close()


def key(store: AdapterStore, name: str) -> bytes:
    return bytes.fromhex(store.info(name).key)


def fetch(store: AdapterStore, which: bytes) -> list[Any]:
    """What the engine's thread gets in the end."""
    deadline = time.monotonic() + 10
    while (pieces := store.fetch(which)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return pieces


def test_host_memory_keeps_what_was_used_last_and_reads_the_rest_again(store: AdapterStore, folder: Path) -> None:
    for name in "abc":
        store.load(name, str(folder / name))
    assert [info.in_host for info in store.infos()] == [False, True, True]
    (piece,) = fetch(store, key(store, "a"))
    assert piece.products["qkv"][2].tolist() == [[4, 0, 0]] * 2
    assert [info.in_host for info in store.infos()] == [True, False, True]
    info = store.info("a")
    assert (info.rank, info.targets, info.num_bytes) == (4, ("down", "q"), 4 * 2 * 4 * (32 + 32 + 48 + 32))


def test_an_adapter_that_has_changed_on_disk_is_not_taken_for_the_old_one(store: AdapterStore, folder: Path) -> None:
    for name in "abc":
        store.load(name, str(folder / name))
    edit_config(folder / "a", lora_alpha=3)
    with pytest.raises(LoadError, match="has changed since it was loaded"):
        fetch(store, key(store, "a"))


def test_loading_in_place_makes_a_new_version_and_leases_keep_the_old(store: AdapterStore, folder: Path) -> None:
    store.load("a", str(folder / "a"))
    with pytest.raises(RequestError, match="set load_inplace"):
        store.load("a", str(folder / "b"))
    with store.lease("a") as old:
        store.load("a", str(folder / "b"), replace=True)
        assert key(store, "a") != old
        with store.lease("a") as new:
            assert new == key(store, "a")
        for name in "cd":  # host memory is full, but the old version cannot be read again
            store.load(name, str(folder / name))
        assert fetch(store, old)
    assert not store.is_live(old)
    with pytest.raises(LoadError, match="was unloaded"):
        store.fetch(old)


def test_one_that_is_refused_leaves_nothing_behind(store: AdapterStore, folder: Path) -> None:
    store.load("a", str(folder / "a"))
    before = store.infos()
    edit_config(folder / "b", use_dora=True)
    for name, replace in (("b", False), ("a", True)):
        with pytest.raises(LoadError, match="DoRA"):
            store.load(name, str(folder / "b"), replace=replace)
    assert store.infos() == before


def test_a_folder_of_adapters_is_read_by_name_when_it_is_needed(store: AdapterStore, folder: Path) -> None:
    assert store.has("d")
    assert store.infos() == []
    store.prepare("d")
    with store.lease("d") as which:
        assert which == key(store, "d")
    for name in ("", "..", "../adapters/a", "nothing", "a\x00", "a" * 256, "a" * 2000):
        assert not store.has(name)
        store.prepare(name)
        with pytest.raises(ModelNotFoundError), store.lease(name):
            pass


def test_unloading_refuses_while_in_use_or_waits(store: AdapterStore, folder: Path) -> None:
    info = store.load("a", str(folder / "a"))
    which, ended = bytes.fromhex(info.key), threading.Event()
    lease = store.lease("a")
    lease.__enter__()
    with pytest.raises(RequestError, match="is used by 1 requests; set wait"):
        store.unload("a")
    with pytest.raises(RequestError, match=r"1 still run after 0\.01 s"):
        store.unload("a", wait=0.01)
    assert not store.infos()
    assert store.is_live(which)  # for the request that runs
    store.load("a", str(folder / "a"))  # the same content: the same version

    def unload() -> None:
        store.unload("a", wait=10)
        ended.set()

    thread = threading.Thread(target=unload)
    thread.start()
    assert not ended.wait(0.05)
    lease.__exit__(None, None, None)
    assert ended.wait(5)
    thread.join()
    assert not store.is_live(which)
    with pytest.raises(ModelNotFoundError, match="there is no adapter 'a'"):
        store.unload("a")


def test_what_was_unloaded_comes_back_by_an_explicit_load_only(store: AdapterStore, folder: Path) -> None:
    store.prepare("a")
    store.unload("a")
    assert not store.has("a")
    store.prepare("a")
    assert store.infos() == []
    store.load("a", str(folder / "a"))
    assert store.has("a")


def test_a_download_keeps_nobody_else_from_loading(
    store: AdapterStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, arrived = threading.Event(), threading.Event()

    def find_late(path: str, download_dir: str | None) -> Path:
        if path == "owner/far":
            begun.set()
            assert arrived.wait(10)
            return folder / "b"
        return find_adapter(path, download_dir)

    monkeypatch.setattr("jaxserve.lora.store.find_adapter", find_late)
    far = threading.Thread(target=store.load, args=("far", "owner/far"))
    far.start()
    assert begun.wait(10)
    others = threading.Thread(target=lambda: (store.load("a", str(folder / "a")), store.prepare("c")))
    others.start()
    others.join(10)
    assert [info.name for info in store.infos()] == ["a", "c"]
    arrived.set()
    far.join()
    assert store.info("far").path == "owner/far"


def test_what_was_made_ready_for_nobody_is_let_go(store: AdapterStore, folder: Path) -> None:
    which = bytes.fromhex(store.load("a", str(folder / "a")).key)
    assert store.fetch(which) is None
    (staged,) = (weakref.ref(version.staged) for version in store._versions.values() if version.staged)
    store.forget(which)
    store.close()
    gc.collect()
    assert staged() is None


def test_files_are_read_again_where_a_name_still_has_them(store: AdapterStore, folder: Path) -> None:
    shutil.copytree(folder / "a", folder / "same")
    for name, path in (("a", "a"), ("same", "same"), ("b", "b"), ("c", "c")):
        store.load(name, str(folder / path))
    assert not store.info("a").in_host
    store.unload("same")
    shutil.rmtree(folder / "same")
    assert fetch(store, key(store, "a"))


def test_two_names_of_one_content_are_one_version(store: AdapterStore, folder: Path) -> None:
    store.load("a", str(folder / "a"))
    store.load("b", str(folder / "a"))
    assert key(store, "a") == key(store, "b")
    store.unload("a")
    assert store.is_live(key(store, "b"))
    assert fetch(store, key(store, "b"))


def test_requests_count_for_the_name_that_they_asked_for(store: AdapterStore, folder: Path) -> None:
    """Two names of one content: one is unloaded when its own requests have ended, whatever the other's do."""
    for name in ("a", "b"):
        store.load(name, str(folder / "a"))
    with store.lease("b"):
        assert (store.info("a").num_requests, store.info("b").num_requests) == (0, 1)
        store.unload("a")
        with pytest.raises(RequestError, match="lora_name 'b' is used by 1 requests"):
            store.unload("b")
        store.load("a", str(folder / "a"))
        with pytest.raises(RequestError, match="but 1 still run after 0 s"):
            store.unload("b", wait=0.0)
        assert store.info("a").num_requests == 0
    assert fetch(store, key(store, "a"))


@pytest.mark.parametrize(
    ("name", "path", "message"),
    [
        ("", "x", "lora_name must be a string of 1 to 256 characters"),
        ("a", "", "lora_path must be a string of 1 to 1024 characters"),
        ("x" * 257, "y", "lora_name must be a string of 1 to 256 characters"),
        ("a", "y" * 1025, "lora_path must be a string of 1 to 1024 characters"),
        (7, "x", "lora_name must be a string"),
    ],
)
def test_names_and_paths_are_checked(store: AdapterStore, name: Any, path: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        store.load(name, path)
