"""The header of a GGUF file: metadata and the list of tensors, read without trusting a byte of it.

The file is a stranger's: every length is checked against what is left of the file before anything is read or allocated,
so that a malformed file ends in CorruptFileError and never in a crash, a huge allocation or a read past the end. (The
reader of the gguf package makes one numpy array per token of the vocabulary, which takes seconds, and checks little.)
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType

from jaxserve.errors import CorruptFileError, UnsupportedModelError

__all__ = ["SERVED_TYPES", "Header", "TensorInfo", "read_header"]

SERVED_TYPES = tuple(
    GGMLQuantizationType[name]
    for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
)

_VERSIONS = (2, 3)
_MAX_DIMS = 4
_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}
# Fewest bytes that one entry takes; a count is checked against them before anything is looped over.
_LEAST_STRING, _LEAST_PAIR, _LEAST_TENSOR = 8, 13, 32


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: its shape (rows first), its type, and where its bytes lie in the file."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """Metadata as Python values, and the tensors by name."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


class _Cursor:
    """Reads forward through the file's bytes; raises CorruptFileError at its end."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.position = 0

    def need(self, num_bytes: int, what: str) -> None:
        left = len(self.data) - self.position
        if num_bytes > left:
            raise CorruptFileError(f"truncated: {what} needs {num_bytes} bytes at {self.position}, but {left} are left")

    def take(self, num_bytes: int, what: str) -> memoryview:
        self.need(num_bytes, what)
        self.position += num_bytes
        return self.data[self.position - num_bytes : self.position]

    def scalar(self, code: str, what: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))[0]

    def text(self, what: str) -> str:
        raw = self.take(self.scalar("Q", what), what)
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError as error:
            raise CorruptFileError(f"{what} is not valid UTF-8") from error

    def value(self, kind: int, what: str) -> Any:
        if kind == GGUFValueType.STRING:
            return self.text(what)
        if kind == GGUFValueType.ARRAY:
            return self.array(what)
        if kind in _SCALARS:
            return self.scalar(_SCALARS[GGUFValueType(kind)], what)
        raise CorruptFileError(f"{what} has the unknown value type {kind}")

    def array(self, what: str) -> list[Any]:
        kind, count = self.scalar("I", what), self.scalar("Q", what)
        if kind in _SCALARS:
            dtype = np.dtype("<" + _SCALARS[GGUFValueType(kind)])
            values: list[Any] = np.frombuffer(self.take(count * dtype.itemsize, what), dtype).tolist()
            return values
        if kind != GGUFValueType.STRING:
            raise CorruptFileError(f"{what} is an array of the value type {kind}, which is not read")
        self.need(count * _LEAST_STRING, what)
        return [self.text(what) for _ in range(count)]


def read_header(data: memoryview) -> Header:
    """Read the header of a whole file.

    Raises:
        CorruptFileError: the bytes are no sound GGUF file of version 2 or 3.
        UnsupportedModelError: a tensor is of a type that is not served, or the file is one part of a split model.
    """
    cursor = _Cursor(data)
    if bytes(cursor.take(4, "the magic")) != b"GGUF":
        raise CorruptFileError("not a GGUF file: it does not begin with GGUF")
    version = cursor.scalar("I", "the version")
    if version not in _VERSIONS:
        big_endian = " (big-endian?)" if version & 0xFFFF == 0 else ""
        raise CorruptFileError(f"GGUF version {version}{big_endian} is not read; read are {_VERSIONS}, little-endian")
    num_tensors, num_pairs = cursor.scalar("Q", "the tensor count"), cursor.scalar("Q", "the metadata count")
    metadata = _read_metadata(cursor, num_pairs)
    parts = metadata.get("split.count")
    if isinstance(parts, int) and parts > 1:
        raise UnsupportedModelError(f"one of {parts} parts of a split model; merge them with gguf-split --merge")
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise CorruptFileError(f"general.alignment must be a power of two, got {alignment!r}")
    cursor.need(num_tensors * _LEAST_TENSOR, "the tensor list")
    listed = [_read_tensor(cursor) for _ in range(num_tensors)]
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for info in listed:
        if info.name in tensors:
            raise CorruptFileError(f"the tensor {info.name} is there twice")
        if info.offset % alignment:
            raise CorruptFileError(f"the tensor {info.name} lies at {info.offset}, no multiple of {alignment}")
        end = start + info.offset + info.num_bytes
        if end > len(data):
            raise CorruptFileError(f"truncated: the tensor {info.name} ends at byte {end}, the file at {len(data)}")
        tensors[info.name] = TensorInfo(info.name, info.shape, info.kind, start + info.offset, info.num_bytes)
    return Header(metadata, tensors)


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    cursor.need(count * _LEAST_PAIR, "the metadata")
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.text("a metadata key")
        if key in metadata:
            raise CorruptFileError(f"the metadata key {key} is there twice")
        metadata[key] = cursor.value(cursor.scalar("I", key), key)
    return metadata


def _read_tensor(cursor: _Cursor) -> TensorInfo:
    """One entry of the tensor list; its offset is still relative to the start of the data."""
    name = cursor.text("a tensor name")
    num_dims = cursor.scalar("I", name)
    if not 1 <= num_dims <= _MAX_DIMS:
        raise CorruptFileError(f"the tensor {name} has {num_dims} dimensions; 1 to {_MAX_DIMS} are possible")
    shape = tuple(cursor.scalar("Q", name) for _ in range(num_dims))[::-1]
    raw_kind, offset = cursor.scalar("I", name), cursor.scalar("Q", name)
    if 0 in shape:
        raise CorruptFileError(f"the tensor {name} has a dimension of 0: {shape}")
    if raw_kind not in SERVED_TYPES:
        known = {int(kind): kind.name for kind in GGMLQuantizationType}
        raise UnsupportedModelError(
            f"the tensor {name} is of type {known.get(raw_kind, raw_kind)}; "
            f"served are {', '.join(kind.name for kind in SERVED_TYPES)}"
        )
    kind = GGMLQuantizationType(raw_kind)
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block_size:
        raise CorruptFileError(f"the tensor {name} has rows of {shape[-1]}, no multiple of {kind.name}'s {block_size}")
    return TensorInfo(name, shape, kind, offset, math.prod(shape) // block_size * block_bytes)
