"""A cache of converted weights, so that a second start reads parameters as they are used.

An entry is an orbax checkpoint beside a manifest with the digest of its files. Its name is a digest of all that it was
made from: the content of the source files, the specs, the dtype. It is written under another name and renamed when
complete, so that a crash leaves none by halves; one that is damaged later fails its digest and is made anew. The cache
only ever saves time: whatever goes wrong with it is a warning, and loading goes on without it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxserve.errors import CorruptFileError
from jaxserve.logging import get_logger
from jaxserve.models.params import ParamTree
from jaxserve.weights.assemble import HostParams
from jaxserve.weights.digest import content_digest
from jaxserve.weights.reader import read_json

__all__ = ["WeightCache", "default_root"]

log = get_logger(__name__)

_LAYOUT = 1  # raised when the same specs come to mean other values
_MANIFEST = "manifest.json"
_PARAMS = "params"
_UNFINISHED = ".unfinished-"
_STALE_SECONDS = 86400


def default_root() -> Path:
    """``~/.cache/jaxserve/weights``, or under ``XDG_CACHE_HOME``."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "jaxserve" / "weights"


class WeightCache:
    """Converted weights under one folder.

    Args:
        root: the folder; it is made when first written to.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def key(self, sources: Sequence[Path], specs: ParamTree, dtype: str) -> str:
        """Name of the entry for these source files, parameters and dtype."""
        made_from = [_LAYOUT, dtype, repr(specs), content_digest(sources)]
        return hashlib.sha256(json.dumps(made_from).encode()).hexdigest()

    def fetch(self, key: str, specs: ParamTree, dtype: str) -> HostParams | None:
        """The parameters of an entry; None if there is no entry, or a damaged one (which is removed)."""
        entry = self.root / key
        if not entry.is_dir():
            return None
        try:
            arrays = _restore(entry, specs)
            _check(arrays, specs, dtype)
        except Exception as error:  # damage shows in as many ways as orbax and tensorstore have errors
            log.warning("The cached weights in %s are damaged and are made anew: %s", entry, error)
            shutil.rmtree(entry, ignore_errors=True)
            return None
        return arrays

    def store(self, key: str, params: HostParams) -> None:
        """Write an entry; a failure is logged, and leaves nothing behind."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._sweep()
            self._require_space(sum(leaf.nbytes for leaf in jax.tree.leaves(params)))
            unfinished = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=self.root))
        except OSError as error:
            log.warning("Converted weights are not cached: %s", error)
            return
        try:
            _save(unfinished, params)
            unfinished.rename(self.root / key)
        except Exception as error:  # as many as there are in orbax and tensorstore; "disk full" is a ValueError there
            if not (self.root / key).is_dir():  # else another process was quicker, with the same content
                log.warning("Converted weights are not cached: %s", error)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)

    def _sweep(self) -> None:
        """Remove what processes that were killed while writing have left."""
        for folder in self.root.glob(_UNFINISHED + "*"):
            if time.time() - folder.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)

    def _require_space(self, num_bytes: int) -> None:
        free = shutil.disk_usage(self.root).free
        if free < num_bytes:
            raise OSError(f"{self.root} has {free >> 20} MiB free, and {num_bytes >> 20} MiB are needed")


def _checkpointer() -> Any:
    # Imported here: orbax takes as long to import as a small model to load, and a cache that is off has no need of it.
    import orbax.checkpoint as ocp

    # Float weights hardly compress; leaving it out halves the time to restore.
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_compression=False))


def _save(entry: Path, params: HostParams) -> None:
    with _checkpointer() as checkpointer:
        checkpointer.save(entry.resolve() / _PARAMS, params)
    files = _files(entry)
    manifest = {"files": [str(path.relative_to(entry)) for path in files], "digest": content_digest(files)}
    (entry / _MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")


def _restore(entry: Path, specs: ParamTree) -> HostParams:
    import orbax.checkpoint as ocp

    manifest = read_json(entry / _MANIFEST)
    if content_digest([entry / name for name in manifest["files"]]) != manifest["digest"]:
        raise CorruptFileError("its files are not what was written")
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), specs)
    with _checkpointer() as checkpointer:
        arrays: HostParams = checkpointer.restore(entry.resolve() / _PARAMS, restore_args=as_numpy)
    return arrays


def _check(arrays: HostParams, specs: ParamTree, dtype: str) -> None:
    """Raise ValueError where the tree, a shape or a dtype is not that of ``specs``."""
    wanted = jax.tree.map(lambda spec: (*spec.shape, dtype), specs, is_leaf=lambda x: hasattr(x, "sources"))
    found = jax.tree.map(lambda array: (*array.shape, array.dtype.name), arrays)
    if found != wanted:
        raise CorruptFileError("its parameters are not those of the model")


def _files(entry: Path) -> list[Path]:
    return sorted(path for path in entry.rglob("*") if path.is_file())
