"""GGUF: values against the gguf package, and malformed files that must end in a clear error."""

from __future__ import annotations

import itertools
import struct
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

from jaxserve.errors import CorruptFileError, LoadError, MissingFileError, UnsupportedModelError
from jaxserve.weights.gguf import GGUFFile
from jaxserve.weights.gguf_header import SERVED_TYPES
from tests.weights.checkpoints import finish

SIMPLE = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
# Where the float16 scales stand in a block of 256 weights, in bytes.
SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def random_blocks(kind: GGMLQuantizationType, rows: int, blocks: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Random quantised rows whose scales are sane numbers."""
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (rows * blocks, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    for at in SCALES[kind.name]:
        raw[:, at : at + 2] = rng.uniform(0.001, 0.01, (rows * blocks, 1)).astype(np.float16).view(np.uint8)
    return raw.reshape(rows, -1)


def test_every_served_type_is_tested() -> None:
    assert {*SIMPLE, *SCALES} == {kind.name for kind in SERVED_TYPES}


@pytest.mark.parametrize("name", SIMPLE)
def test_values_survive_quantisation(name: str, tmp_path: Path) -> None:
    kind = GGMLQuantizationType[name]
    values = np.random.default_rng(0).standard_normal((3, 64), np.float32)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("w", quantize(values, kind), raw_dtype=kind)
    finish(writer)
    file = GGUFFile(tmp_path / "x.gguf")
    assert file.shapes == {"w": (3, 64)}
    read = file.read("w").astype(np.float32)
    np.testing.assert_array_equal(read, dequantize(quantize(values, kind), kind).reshape(3, 64))
    np.testing.assert_allclose(read, values, atol=0.5 if "4" in name else 0.2)
    assert file.dtype("w") == {"F32": "float32", "F16": "float16"}.get(name, "bfloat16")


@pytest.mark.parametrize("name", SCALES)
def test_k_quants(name: str, tmp_path: Path) -> None:
    kind = GGMLQuantizationType[name]
    raw = random_blocks(kind, rows=3, blocks=2)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("w", raw, raw_dtype=kind)
    finish(writer)
    read = GGUFFile(tmp_path / "x.gguf").read("w")
    np.testing.assert_array_equal(read, dequantize(raw, kind))
    assert read.shape == (3, 512)
    assert np.isfinite(read).all()
    assert read.std() > 0


def test_metadata_as_python_values(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_uint32("u", 7)
    writer.add_int64("i", -(2**40))
    writer.add_float32("f", 0.5)
    writer.add_bool("b", True)
    writer.add_string("s", "ď 🦙")
    writer.add_array("ints", [1, 2, 3])
    writer.add_array("words", ["a", "", "ü"])
    finish(writer)
    metadata = GGUFFile(tmp_path / "x.gguf").metadata
    wanted = {"u": 7, "i": -(2**40), "f": 0.5, "b": True, "s": "ď 🦙", "ints": [1, 2, 3], "words": ["a", "", "ü"]}
    assert {key: metadata[key] for key in wanted} == wanted
    assert metadata["general.architecture"] == "llama"
    assert type(metadata["ints"][0]) is int


def test_a_large_vocabulary_is_read_quickly(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_array("tokens", [f"token{i}" for i in range(100_000)])
    finish(writer)
    start = time.process_time()
    assert GGUFFile(tmp_path / "x.gguf").metadata["tokens"][-1] == "token99999"
    assert time.process_time() - start < 2.0  # one numpy array per token takes some eight seconds


def test_what_was_read_outlives_the_file(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("w", np.ones((2, 4), np.float32))
    finish(writer)
    assert GGUFFile(tmp_path / "x.gguf").read("w").flags.owndata


# Malformed files, made by hand.


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str = "w", dims: tuple[int, ...] = (4, 2), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def build(
    tensors: list[bytes] | None = None,
    pairs: list[bytes] | None = None,
    *,
    start: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
    data: bytes = bytes(64),
) -> bytes:
    tensors, pairs = [tensor()] if tensors is None else tensors, pairs or []
    counts = counts or (len(tensors), len(pairs))
    header = start + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(tensors)
    return header + bytes(-len(header) % 32) + data


def opened(tmp_path: Path, content: bytes) -> GGUFFile:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    return GGUFFile(path)


def test_the_hand_made_file_is_sound(tmp_path: Path) -> None:
    np.testing.assert_array_equal(opened(tmp_path, build()).read("w"), np.zeros((2, 4)))


HUGE = struct.pack("<Q", 2**63)
MALFORMED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "wrong magic": (build(start=b"GGML"), "does not begin with GGUF"),
    "only the magic": (b"GGUF", "truncated: the version"),
    "version 1": (build(version=1), "version 1"),
    "big-endian": (build(version=3 << 24), "big-endian"),
    "zero dimension": (build([tensor(dims=(4, 0))]), "w has a dimension of 0"),
    "zero row": (build([tensor(dims=(0, 4), kind=2)]), "w has a dimension of 0"),
    "no dimensions": (build([tensor(dims=())] * 2), "w has 0 dimensions"),
    "five dimensions": (build([tensor(dims=(1,) * 5)]), "w has 5 dimensions"),
    "offset beyond the file": (build([tensor(offset=2**40)]), "w ends at byte"),
    "offset off the alignment": (build([tensor(offset=4)]), "no multiple of 32"),
    "more elements than the file": (build([tensor(dims=(2**40, 2**20))]), "w ends at byte"),
    "elements beyond 64 bits": (build([tensor(dims=(2**63, 2**63))]), "w ends at byte"),
    "half a block": (build([tensor(dims=(33, 1), kind=2)]), "rows of 33"),
    "two of a name": (build([tensor(), tensor()]), "w is there twice"),
    "truncated data": (build()[:-40], "truncated: the tensor w"),
    "endless tensor count": (build(counts=(2**60, 0)), "truncated: the tensor list"),
    "endless metadata count": (build(counts=(1, 2**60)), "truncated: the metadata"),
    "endless string": (build(pairs=[pair("s", 8, HUGE)]), "truncated: s"),
    "endless array of strings": (build(pairs=[pair("a", 9, struct.pack("<I", 8) + HUGE)]), "truncated: a"),
    "endless array of numbers": (build(pairs=[pair("a", 9, struct.pack("<I", 4) + HUGE)]), "truncated: a"),
    "array of arrays": (build(pairs=[pair("a", 9, struct.pack("<IQ", 9, 1))]), "value type 9"),
    "unknown value type": (build(pairs=[pair("k", 99, b"")]), "unknown value type 99"),
    "key twice": (build(pairs=[pair("k", 0, b"\1")] * 2), "k is there twice"),
    "key that is no text": (build(pairs=[text(b"\xff\xfe") + struct.pack("<IB", 0, 1)]), "not valid UTF-8"),
    "zero alignment": (build(pairs=[pair("general.alignment", 4, struct.pack("<I", 0))]), "power of two"),
    "odd alignment": (build(pairs=[pair("general.alignment", 4, struct.pack("<I", 24))]), "power of two"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_files_are_refused(case: str, tmp_path: Path) -> None:
    content, message = MALFORMED[case]
    with pytest.raises(CorruptFileError, match=message) as caught:
        opened(tmp_path, content)
    assert "bad.gguf" in str(caught.value)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = build(pairs=[pair("s", 8, text("abc")), pair("a", 9, struct.pack("<IQ", 8, 1) + text("x"))])
    for length in range(len(whole) - 32):
        with pytest.raises(CorruptFileError):
            opened(tmp_path, whole[:length])


def test_flipped_bytes_never_crash(tmp_path: Path) -> None:
    whole = build(pairs=[pair("s", 8, text("abc")), pair("n", 9, struct.pack("<IQ", 4, 2) + bytes(8))])
    for at, value in itertools.product(range(len(whole) - 64), (0x00, 0x7F, 0xFF)):
        content = bytearray(whole)
        content[at] = value
        try:
            file = opened(tmp_path, bytes(content))
        except LoadError:
            continue
        for name in file.shapes:
            file.read(name)


@pytest.mark.parametrize(("kind", "name"), [(10, "Q2_K"), (20, "IQ4_NL"), (26, "I32"), (9999, "9999")])
def test_other_types_are_refused_by_name(kind: int, name: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=f"w is of type {name}.*Q4_K"):
        opened(tmp_path, build([tensor(dims=(256, 1), kind=kind)], data=bytes(512)))


def test_a_part_of_a_split_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="one of 3 parts"):
        opened(tmp_path, build(pairs=[pair("split.count", 2, struct.pack("<H", 3))]))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"none\.gguf"):
        GGUFFile(tmp_path / "none.gguf")
