"""Safetensors folders, single file or sharded, read one tensor at a time.

Only headers are read up front, and only one shard is mapped at a time, so that what the process holds never exceeds the
tensors it has asked for plus one shard. Who must not be hurt by a file that is overwritten while it is read (a mapping
whose file has shrunk kills the process) reads it at once instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, deserialize, safe_open

from jaxserve.errors import CorruptFileError, MissingFileError, UnsupportedModelError
from jaxserve.weights.reader import RawBlocks, read_json

__all__ = ["INDEX", "SafetensorsCopy", "SafetensorsReader", "has_safetensors"]

INDEX = "model.safetensors.index.json"
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_INTEGERS = ("I64", "I32")
# Mistral publishes the same weights a second time under names of its own; adapters are no part of the model.
_FOREIGN = ("consolidated", "adapter_")


def has_safetensors(folder: Path) -> bool:
    """Whether the folder claims to hold safetensors weights."""
    return (folder / INDEX).exists() or bool(_unindexed(folder))


class SafetensorsReader:
    """The weights of a Hugging Face folder, or those of one file.

    Raises:
        MissingFileError: a shard that the index names is not there, or there are no weights at all.
        CorruptFileError: a file is truncated or no safetensors file, or lacks tensors that the index places in it.
        UnsupportedModelError: a tensor is not float32, bfloat16 or float16.
    """

    def __init__(self, source: Path) -> None:
        folder, index = source, source / INDEX
        placed = _placed(index) if index.exists() else {}
        self.files: tuple[Path, ...] = tuple(folder / name for name in sorted(set(placed.values()))) or (
            (source,) if source.is_file() else _unindexed(folder)
        )
        missing = [path.name for path in self.files if not path.exists()]
        if missing:
            raise MissingFileError(f"{INDEX} names {', '.join(missing)}, which is not in {folder}.")
        if not self.files:
            bins = (
                " It holds PyTorch .bin files, which are not read: convert them." if any(folder.glob("*.bin")) else ""
            )
            raise MissingFileError(f"There is no .safetensors file in {folder}.{bins}")
        self._shard_of: dict[str, Path] = {}
        self._dtypes: dict[str, str] = {}
        self._open: tuple[Path, Any] | None = None
        shapes: dict[str, tuple[int, ...]] = {}
        for path in self.files:
            handle = self._handle(path)
            for name in handle.keys():  # noqa: SIM118 - the handle is no mapping
                view = handle.get_slice(name)
                shapes[name] = tuple(view.get_shape())
                self._dtypes[name] = view.get_dtype()
                self._shard_of[name] = path
        self.shapes: Mapping[str, tuple[int, ...]] = shapes
        for name, file in placed.items():
            if name not in shapes:
                raise CorruptFileError(f"{INDEX} places {name} in {file}, which does not hold it.")

    def dtype(self, name: str) -> str:
        """See TensorReader; raises UnsupportedModelError for what is no served float."""
        return _served(name, self._dtypes[name])

    def read(self, name: str) -> np.ndarray[Any, np.dtype[Any]]:
        """See TensorReader."""
        self.dtype(name)
        tensor: np.ndarray[Any, np.dtype[Any]] = self._handle(self._shard_of[name]).get_tensor(name)
        return tensor

    def integers(self, name: str) -> np.ndarray[Any, np.dtype[Any]]:
        """A tensor of integers; raises UnsupportedModelError for others."""
        stored = self._dtypes[name]
        if stored not in _INTEGERS:
            raise UnsupportedModelError(f"{name} is stored as {stored}. It must be one of: {', '.join(_INTEGERS)}.")
        tensor: np.ndarray[Any, np.dtype[Any]] = self._handle(self._shard_of[name]).get_tensor(name)
        return tensor

    def raw(self, name: str) -> RawBlocks | None:
        """See TensorReader; quantised ones are not read."""
        return None

    def _handle(self, path: Path) -> Any:
        if self._open is None or self._open[0] != path:
            self._open = None  # unmap the previous shard first
            try:
                self._open = (path, safe_open(str(path), framework="numpy"))
            except (SafetensorError, OSError) as error:
                raise _incomplete(path, error) from error
        return self._open[1]


class SafetensorsCopy:
    """One file as it was at one moment, all of it in memory. See TensorReader for its methods and attributes.

    Raises:
        CorruptFileError: it is truncated or no safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.files: tuple[Path, ...] = (path,)
        try:
            self._tensors: dict[str, dict[str, Any]] = dict(deserialize(path.read_bytes()))
        except (SafetensorError, OSError) as error:
            raise _incomplete(path, error) from error
        self.shapes: Mapping[str, tuple[int, ...]] = {name: tuple(t["shape"]) for name, t in self._tensors.items()}

    def dtype(self, name: str) -> str:
        """See TensorReader; raises UnsupportedModelError for what is no served float."""
        return _served(name, self._tensors[name]["dtype"])

    def read(self, name: str) -> np.ndarray[Any, np.dtype[Any]]:
        """See TensorReader."""
        dtype = self.dtype(name)
        values = np.frombuffer(self._tensors[name]["data"], ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        return values.reshape(self.shapes[name])

    def raw(self, name: str) -> RawBlocks | None:
        """See TensorReader; quantised ones are not read."""
        return None


def _served(name: str, stored: str) -> str:
    if stored not in _DTYPES:
        raise UnsupportedModelError(f"{name} is stored as {stored}. Read are: {', '.join(_DTYPES)}.")
    return _DTYPES[stored]


def _incomplete(path: Path, error: Exception) -> CorruptFileError:
    return CorruptFileError(f"{path} is not a complete safetensors file: {error}.")


def _placed(index: Path) -> dict[str, str]:
    """Tensor name -> file name, as the index has it."""
    placed = read_json(index).get("weight_map")
    if not isinstance(placed, dict) or not placed or not all(_plain(name) for name in placed.values()):
        raise CorruptFileError(f"{index}: weight_map must map tensor names to file names in the same folder.")
    return placed


def _plain(name: Any) -> bool:
    return isinstance(name, str) and name not in ("", "..") and Path(name).name == name


def _unindexed(folder: Path) -> tuple[Path, ...]:
    return tuple(p for p in sorted(folder.glob("*.safetensors")) if not p.name.startswith(_FOREIGN))
