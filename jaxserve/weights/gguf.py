"""GGUF files: metadata as Python values, tensors dequantised one at a time.

Free of jax, so that the host side may read a tokenizer out of the metadata.
"""

from __future__ import annotations

import math
import mmap
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from jaxserve.errors import CorruptFileError, LoadError, MissingFileError
from jaxserve.weights.gguf_header import read_header
from jaxserve.weights.reader import RawBlocks

__all__ = ["GGUFFile"]

_FLOATS: dict[GGMLQuantizationType, np.dtype[Any]] = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}


class GGUFFile:
    """One GGUF file, mapped into memory.

    Attributes:
        metadata: key -> Python value (lists for arrays).
        files, shapes: see TensorReader.

    Raises:
        MissingFileError, CorruptFileError, UnsupportedModelError: each with the file's path and what is wrong with it.
    """

    def __init__(self, path: Path | str) -> None:
        path = Path(path)
        try:
            with path.open("rb") as file:
                self._data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except FileNotFoundError:
            raise MissingFileError(f"{path} is not there.") from None
        except ValueError:  # mmap refuses an empty file
            raise CorruptFileError(f"{path} is empty.") from None
        try:
            header = read_header(self._data)
        except LoadError as error:
            raise type(error)(f"{path}: {error}.") from error
        self.files: tuple[Path, ...] = (path,)
        self.metadata = header.metadata
        self.shapes: Mapping[str, tuple[int, ...]] = {name: info.shape for name, info in header.tensors.items()}
        self._tensors = header.tensors

    def main_dtype(self) -> str:
        """The dtype that holds most of the weights best."""
        sizes: Counter[str] = Counter()
        for name, shape in self.shapes.items():
            sizes[self.dtype(name)] += math.prod(shape)
        return sizes.most_common(1)[0][0] if sizes else "float32"

    def dtype(self, name: str) -> str:
        """See TensorReader. Quantised tensors have the range of float32 scales, which float16 may not hold."""
        kind = self._tensors[name].kind
        return _FLOATS[kind].name if kind in _FLOATS else "bfloat16"

    def read(self, name: str) -> np.ndarray[Any, np.dtype[Any]]:
        """See TensorReader; quantised tensors come as float32."""
        info = self._tensors[name]
        blocks = self.raw(name)
        if blocks is None:
            return self._bytes(name).view(_FLOATS[info.kind]).reshape(info.shape).copy()
        return dequantize(blocks.rows, info.kind)

    def raw(self, name: str) -> RawBlocks | None:
        """See TensorReader."""
        info = self._tensors[name]
        if info.kind in _FLOATS:
            return None
        block_size, block_bytes = GGML_QUANT_SIZES[info.kind]
        row_bytes = info.shape[-1] // block_size * block_bytes
        return RawBlocks(info.kind.name, self._bytes(name).reshape(*info.shape[:-1], row_bytes))

    def _bytes(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        info = self._tensors[name]
        return np.frombuffer(self._data[info.offset : info.offset + info.num_bytes], np.uint8)
