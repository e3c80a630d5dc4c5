"""Adapters by name, and which of them are in host memory.

A name stands for a *version*: the content of an adapter's files. Loading a name again in place makes a new version, and
requests that began with the old one end with it. What a request needs is a lease on a version; a version without a name
and without leases is let go.

Host memory holds the factors of the versions that were used last, others are read again from their files. That is done
by a thread of the store, so that no step waits for a disk; so is laying factors out in the shape of the device's slots.
"""

from __future__ import annotations

import reprlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxserve.errors import LoadError, MissingFileError, ModelNotFoundError, RequestError, nearest
from jaxserve.logging import get_logger
from jaxserve.lora.adapter import Adapter, find_adapter, read_adapter
from jaxserve.lora.layout import Layout
from jaxserve.lora.peft import CONFIG
from jaxserve.outputs import AdapterInfo

__all__ = ["AdapterStore"]

_log = get_logger(__name__)
_LONGEST = {"lora_name": 256, "lora_path": 1024}  # of a request's model, no longer name is looked up


@dataclass(slots=True, eq=False)
class _Version:
    """One content. ``adapter`` is None while it is on disk only; ``staged`` is what is made ready for a slot.

    ``names`` holds where each name has its files; ``folder`` is where they are read again. ``leases`` counts requests
    by the name that they asked for.
    """

    key: bytes
    folder: Path
    rank: int
    targets: tuple[str, ...]
    num_bytes: int
    adapter: Adapter | None
    leases: Counter[str] = field(default_factory=Counter)
    names: dict[str, Path] = field(default_factory=dict)
    staged: Future[list[Any]] | None = None

    def take_name(self, name: str) -> None:
        """It is called so no longer, and that name's files may go."""
        del self.names[name]
        self.folder = next(reversed(self.names.values()), self.folder)


class AdapterStore:
    """All adapters of an engine; may be used from any thread.

    Args:
        layout: where factors lie.
        max_host: most versions whose factors are in host memory, but for those that cannot be read again.
        folder: where an unknown name is looked for, if anywhere.
        download_dir: cache folder of downloads.
    """

    def __init__(
        self, layout: Layout, *, max_host: int, folder: Path | None = None, download_dir: str | None = None
    ) -> None:
        self.layout = layout
        self._max_host = max_host
        self._folder = folder
        self._download_dir = download_dir
        self._lock = threading.Condition()
        self._loading = threading.Lock()  # files are read one at a time, without the other lock
        self._names: dict[str, tuple[_Version, str, str | None]] = {}  # with path and base model
        self._withdrawn: set[str] = set()  # unloaded: not brought back by a request, though the folder may hold it
        self._versions: dict[bytes, _Version] = {}
        self._recent: OrderedDict[bytes, None] = OrderedDict()  # those in host memory, the last used last
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="jaxserve-adapters")

    # ------------------------------------------------------------------ by name
    def load(self, name: str, path: str, *, base_model: str | None = None, replace: bool = False) -> AdapterInfo:
        """Read an adapter's files and give it a name; nothing is kept of one that is refused.

        Args:
            name: what requests will call it.
            path: a PEFT folder or hub id.
            base_model: name of its base model, to be shown; by default what its files say.
            replace: put it in the place of another of that name, for all requests from now on.

        Raises:
            RequestError: the name is taken, or cannot be one.
            LoadError: it cannot be read or does not fit.
        """
        _check_text(name, "lora_name")
        _check_text(path, "lora_path")
        self._check_free(name, replace)
        with _explained(path):
            folder = find_adapter(path, self._download_dir)  # a download keeps nobody else from loading
        with self._loading:
            self._check_free(name, replace)
            return self._add(name, path, folder, base_model)

    def unload(self, name: str, *, wait: float | None = None) -> None:
        """Take an adapter's name away and free what it held. Only ``load`` brings it back, and no request does.

        Args:
            name: of a loaded adapter.
            wait: None refuses while requests use it; else new ones are refused from now on, and it is waited up to
                this many seconds until the others have ended.

        Raises:
            ModelNotFoundError: there is no such adapter.
            RequestError: it is in use, or still is after so long a wait; in the latter case its name is gone.
        """
        with self._lock:
            version = self._find(name)[0]
            if wait is None and (count := version.leases[name]):
                raise RequestError(
                    f"lora_name {name!r} is used by {count} requests; set wait to unload it when they have ended.",
                    "lora_name",
                )
            del self._names[name]
            if self._lazy(name) is not None:
                self._withdrawn.add(name)
            version.take_name(name)
            self._let_go(version)
            if wait is None or self._lock.wait_for(lambda: not version.leases[name] or name in version.names, wait):
                return
            raise RequestError(
                f"lora_name {name!r} takes no new requests, but {version.leases[name]} still run after {wait:g} s; it "
                "is freed when they end.",
                "lora_name",
            )

    def info(self, name: str) -> AdapterInfo:
        """What is known of an adapter; ModelNotFoundError if there is none of that name."""
        with self._lock:
            version, path, base_model = self._find(name)
            return AdapterInfo(
                name,
                path,
                base_model,
                version.key.hex(),
                version.rank,
                version.targets,
                version.num_bytes,
                version.adapter is not None,
                version.leases[name],
            )

    def infos(self) -> list[AdapterInfo]:
        """All adapters that have a name, in order of loading."""
        with self._lock:
            return [self.info(name) for name in self._names]

    def has(self, name: str) -> bool:
        """Whether requests may use this name: it is loaded, or lies in the folder for lazy loading."""
        return name in self._names or self._lazy(name) is not None

    def prepare(self, name: str) -> None:
        """Load an adapter that is not loaded, if it lies in the folder for lazy loading; raises what ``load`` does."""
        if name in self._names or self._lazy(name) is None:
            return
        with self._loading:
            if name not in self._names and (folder := self._lazy(name)) is not None:  # else another was quicker
                self._add(name, str(folder), folder)

    @contextmanager
    def lease(self, name: str) -> Iterator[bytes]:
        """The key of what a loaded name stands for now, which stays usable for as long as the context is open.

        Never waits for files. Raises ModelNotFoundError.
        """
        with self._lock:
            version = self._find(name)[0]
            version.leases[name] += 1
        try:
            yield version.key
        finally:
            with self._lock:
                version.leases -= Counter([name])
                self._let_go(version)
                self._lock.notify_all()

    def close(self) -> None:
        """Stop reading."""
        self._reader.shutdown(wait=True, cancel_futures=True)

    # ------------------------------------------------------------------ by key, for the engine's thread
    def is_live(self, key: bytes) -> bool:
        """Whether anybody may still ask for a version."""
        return key in self._versions

    def fetch(self, key: bytes) -> list[Any] | None:
        """What is to be copied into a slot, handed out once; None while it is made ready, which this call begins.

        Raises LoadError: it cannot be read again.
        """
        with self._lock:
            version = self._versions.get(key)
            if version is None:
                raise MissingFileError("the adapter was unloaded.")
            if version.staged is None:
                version.staged = self._reader.submit(self._stage, version)
            if not version.staged.done():
                return None
            staged, version.staged = version.staged, None
        try:
            return staged.result()
        except LoadError:
            raise
        except Exception as error:  # the caller is the engine's thread, which must not end with one adapter
            raise LoadError(f"the adapter in {version.folder} cannot be read: {error}.") from error

    def forget(self, key: bytes) -> None:
        """Nobody will fetch it: what was made ready goes."""
        with self._lock:
            version = self._versions.get(key)
            if version is not None and version.staged is not None:
                version.staged.cancel()
                version.staged = None

    # ------------------------------------------------------------------ parts
    def _check_free(self, name: str, replace: bool) -> None:
        known = self._names.get(name)
        if known is not None and not replace:
            raise RequestError(
                f"lora_name {name!r} is loaded already, from {known[1]}; set load_inplace to replace it.",
                "lora_name",
            )

    def _add(self, name: str, path: str, folder: Path, base_model: str | None = None) -> AdapterInfo:
        """Read files and name what they hold; one at a time."""
        with _explained(path):
            adapter = read_adapter(folder, self.layout)
        with self._lock:
            version = self._versions.setdefault(
                adapter.key,
                _Version(adapter.key, folder, adapter.rank, adapter.targets, adapter.num_bytes, adapter),
            )
            version.folder, version.adapter = folder, adapter
            old = self._names.get(name)
            version.names[name] = folder
            self._names[name] = version, path, base_model or adapter.base_model
            self._withdrawn.discard(name)
            if old is not None and old[0] is not version:
                old[0].take_name(name)
                self._let_go(old[0])
            self._touch(version)
        mebibytes = adapter.num_bytes / 2**20
        _log.info("adapter %s: rank %d, %s, %.1f MiB", name, adapter.rank, "/".join(adapter.targets), mebibytes)
        return self.info(name)

    def _stage(self, version: _Version) -> list[Any]:
        """In the store's thread: the factors in the shape of a slot."""
        adapter = version.adapter
        if adapter is None:
            adapter = read_adapter(version.folder, self.layout)
            if adapter.key != version.key:
                raise LoadError(f"the adapter in {version.folder} has changed since it was loaded: load it again.")
        with self._lock:
            version.adapter = adapter
            self._touch(version)
        factors = dict(adapter.factors)
        pieces: list[Any] = list(self.layout.pieces(factors))
        if self.layout.has_tables:
            pieces.append(self.layout.table_piece(factors))
        return pieces

    def _lazy(self, name: str) -> Path | None:
        if self._folder is None or not 0 < len(name) <= _LONGEST["lora_name"] or name in self._withdrawn:
            return None
        if "\x00" in name or Path(name).name != name or name == "..":
            return None
        folder = self._folder / name
        try:
            return folder if (folder / CONFIG).is_file() else None
        except OSError:  # no file can have such a name, or nobody may look
            return None

    def _find(self, name: str) -> tuple[_Version, str, str | None]:
        if name not in self._names:
            raise ModelNotFoundError(f"there is no adapter {name!r}.{nearest(name, self._names)}", "lora_name")
        return self._names[name]

    def _let_go(self, version: _Version) -> None:
        """Forget a version that nobody can ask for any more."""
        if not version.names and not version.leases:
            self._versions.pop(version.key, None)
            self._recent.pop(version.key, None)
            version.adapter = None

    def _touch(self, version: _Version) -> None:
        """A version is used, and in host memory: others make room."""
        if self._versions.get(version.key) is not version:
            return
        self._recent[version.key] = None
        self._recent.move_to_end(version.key)
        # One that has lost its name can be somewhere else on disk by now: it stays until its requests have ended.
        spare = [key for key in self._recent if self._versions[key].names and key != version.key]
        for key in spare[: max(0, len(self._recent) - self._max_host)]:
            del self._recent[key]
            self._versions[key].adapter = None


@contextmanager
def _explained(path: str) -> Iterator[None]:
    """LoadError in place of what the file system says."""
    try:
        yield
    except LoadError:
        raise
    except OSError as error:
        raise LoadError(f"the adapter {path} cannot be read: {error.strerror or error}.") from error


def _check_text(value: str, param: str) -> None:
    if not isinstance(value, str) or not 0 < len(value) <= _LONGEST[param]:
        shown = reprlib.repr(value)
        raise RequestError(f"{param} must be a string of 1 to {_LONGEST[param]} characters, got {shown}.", param)
