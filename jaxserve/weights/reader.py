"""What every kind of checkpoint can do: name its tensors, and read one at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxserve.errors import CorruptFileError, MissingFileError

__all__ = ["RawBlocks", "TensorReader", "read_json"]


class RawBlocks(NamedTuple):
    """A quantised tensor as it lies in a GGUF file: GGML's name of its kind, and uint8 [rows, bytes of a row]."""

    kind: str
    rows: np.ndarray[Any, np.dtype[np.uint8]]


class TensorReader(Protocol):
    """A checkpoint on disk.

    Attributes:
        files: the files that its tensors lie in.
        shapes: tensor name -> shape, rows first.
    """

    files: tuple[Path, ...]
    shapes: Mapping[str, tuple[int, ...]]

    def read(self, name: str) -> np.ndarray[Any, np.dtype[Any]]:
        """The tensor as float32, bfloat16 or float16, in memory of its own (no view of the file)."""

    def dtype(self, name: str) -> str:
        """Name of the dtype that holds the tensor best: float32, bfloat16 or float16."""

    def raw(self, name: str) -> RawBlocks | None:
        """A view of the tensor in the file if it is quantised, None if it holds floats."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; raises MissingFileError or CorruptFileError with the file's name."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MissingFileError(f"{path} is not there.") from None
    except ValueError as error:
        raise CorruptFileError(f"{path} is not valid JSON: {error}.") from error
    except RecursionError:
        raise CorruptFileError(f"{path} is nested too deeply.") from None
    if not isinstance(value, dict):
        raise CorruptFileError(f"{path} must hold a JSON object, but holds a {type(value).__name__}.")
    return value
