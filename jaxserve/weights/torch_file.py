"""Checkpoints that ``torch.save`` wrote, read without torch and without running what they say.

Such a file is a zip: a pickle of the state dict, and one file of raw values per storage. A pickle may call anything, so
this one may call the few functions that tensors are made with, and these only note where a tensor's values lie.
"""

from __future__ import annotations

import collections
import io
import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxserve.errors import CorruptFileError, MissingFileError, UnsupportedModelError
from jaxserve.weights.reader import RawBlocks

__all__ = ["TorchFile"]

_DTYPES: dict[str, np.dtype[Any]] = {
    "FloatStorage": np.dtype(np.float32),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "BoolStorage": np.dtype(np.bool_),
}


class _Storage(NamedTuple):
    name: str
    dtype: np.dtype[Any]


class _Tensor(NamedTuple):
    """Where a tensor lies in its storage, in elements."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class TorchFile:
    """A state dict of tensors. See TensorReader for its methods and attributes.

    Raises:
        MissingFileError: there is no such file.
        CorruptFileError: it is not what torch.save writes (since torch 1.6), or it is truncated.
        UnsupportedModelError: it holds something else than tensors by name, or tensors of other kinds than floats,
            integers and truth values.
    """

    def __init__(self, path: Path) -> None:
        self.files: tuple[Path, ...] = (path,)
        try:
            self._zip = zipfile.ZipFile(path)
            (index,) = (name for name in self._zip.namelist() if name.endswith("/data.pkl"))
            state = _Unpickler(io.BytesIO(self._zip.read(index))).load()
        except FileNotFoundError:
            raise MissingFileError(f"{path} is not there.") from None
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{path}: {error}") from None
        except Exception as error:  # damage shows in as many ways as zip and pickle have errors
            raise CorruptFileError(f"{path} is no complete file of torch.save: {error}.") from error
        if not isinstance(state, Mapping) or not all(isinstance(value, _Tensor) for value in state.values()):
            raise UnsupportedModelError(f"{path} must hold tensors by name, and nothing else.")
        self._folder = index.removesuffix("data.pkl")
        self._tensors: dict[str, _Tensor] = {str(name): tensor for name, tensor in state.items()}
        self.shapes: Mapping[str, tuple[int, ...]] = {name: tensor.shape for name, tensor in self._tensors.items()}

    def dtype(self, name: str) -> str:
        """See TensorReader; raises UnsupportedModelError for what is no float."""
        dtype = self._tensors[name].storage.dtype.name
        if dtype not in ("float32", "float16", "bfloat16"):
            raise UnsupportedModelError(f"{self.files[0]}: {name} must hold floats, and holds {dtype}.")
        return dtype

    def read(self, name: str) -> np.ndarray[Any, np.dtype[Any]]:
        """See TensorReader; raises CorruptFileError if the file ends before the tensor does."""
        self.dtype(name)
        return self._read(name)

    def integers(self, name: str) -> np.ndarray[Any, np.dtype[Any]]:
        """A tensor of integers; raises UnsupportedModelError for others, and as ``read``."""
        dtype = self._tensors[name].storage.dtype
        if dtype.kind != "i":
            raise UnsupportedModelError(f"{self.files[0]}: {name} must hold integers, and holds {dtype.name}.")
        return self._read(name)

    def _read(self, name: str) -> np.ndarray[Any, np.dtype[Any]]:
        storage, offset, shape, strides = self._tensors[name]
        try:
            values = np.frombuffer(self._zip.read(f"{self._folder}data/{storage.name}"), storage.dtype)
        except Exception as error:  # as above
            raise CorruptFileError(f"{self.files[0]}: the values of {name} cannot be read: {error}.") from error
        last = offset + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
        if min(offset, *shape, *strides, 0) < 0 or (0 not in shape and last >= len(values)):
            raise CorruptFileError(f"{self.files[0]}: {name} reaches beyond its values.")
        steps = tuple(step * storage.dtype.itemsize for step in strides)
        return np.lib.stride_tricks.as_strided(values[offset:], shape, steps).copy()

    def raw(self, name: str) -> RawBlocks | None:
        """See TensorReader; there are no quantised ones."""
        return None


class _Unpickler(pickle.Unpickler):
    """Knows state dicts of tensors and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _DTYPES:
            return name
        found = _KNOWN.get((module, name))
        if found is None:
            raise UnsupportedModelError(
                f"it refers to {module}.{name}; read are dicts of tensors of floats and integers."
            )
        return found

    def persistent_load(self, pid: Any) -> Any:
        _, kind, name, *_ = pid
        return _Storage(str(name), _DTYPES[kind])


def _tensor(storage: _Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any) -> _Tensor:
    if not isinstance(storage, _Storage) or len(shape) != len(strides):
        raise TypeError("the place of a tensor's values is not where one can be")
    if any(type(number) is not int for number in (offset, *shape, *strides)):
        raise TypeError("the place of a tensor's values is not given in integers")
    return _Tensor(storage, offset, shape, strides)


def _parameter(tensor: _Tensor, *_: Any) -> _Tensor:
    return tensor


_KNOWN: dict[tuple[str, str], Callable[..., Any]] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
}
