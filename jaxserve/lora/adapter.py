"""One adapter, from a PEFT folder to factors in memory. All of it is checked before any of it is kept."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.errors import CorruptFileError, LoadError, MissingFileError, ShapeMismatchError, UnsupportedModelError
from jaxserve.lora.layout import EMBED, TARGETS, Factors, Layout
from jaxserve.lora.peft import CONFIG, PeftSettings, read_settings
from jaxserve.models.names import HF_NAMES
from jaxserve.weights.digest import content_digest
from jaxserve.weights.hub import fetch_folder
from jaxserve.weights.reader import TensorReader
from jaxserve.weights.safetensors import SafetensorsCopy
from jaxserve.weights.torch_file import TorchFile

__all__ = ["Adapter", "find_adapter", "read_adapter"]

_SAFETENSORS, _BIN = "adapter_model.safetensors", "adapter_model.bin"
_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?:(?P<linear>[AB])\.weight|embedding_(?P<table>[AB]))")


@dataclass(frozen=True)
class Adapter:
    """An adapter in host memory.

    Attributes:
        key: digest of its files: what its KV and its slot are known by.
        factors: by layer (0 for the embedding and the head) and projection.
        base_model: for which model it was made, as its trainer named it.
    """

    key: bytes
    factors: Mapping[tuple[int, str], Factors]
    base_model: str | None

    @property
    def rank(self) -> int:
        """The largest of its ranks."""
        return max(len(own.b) for own in self.factors.values())

    @property
    def targets(self) -> tuple[str, ...]:
        """The projections that it changes in some layer."""
        return tuple(sorted({projection for _, projection in self.factors}))

    @property
    def num_bytes(self) -> int:
        """Of the factors."""
        return sum(own.num_bytes for own in self.factors.values())


def find_adapter(path: str, download_dir: str | None = None) -> Path:
    """The folder of an adapter, downloaded if it is a hub id; raises MissingFileError."""
    folder = fetch_folder(path, (CONFIG, _SAFETENSORS, _BIN), download_dir, what="adapter")
    if not (folder / CONFIG).is_file():
        raise MissingFileError(f"There is no {CONFIG} in {folder}: it is no adapter that PEFT has saved.")
    return folder


def read_adapter(folder: Path, layout: Layout) -> Adapter:
    """Read and check an adapter.

    Raises:
        LoadError: a file is not there or damaged, the adapter is of a kind that is not served, does not fit the model,
            is larger than the layout allows, or is being overwritten. The message says which.
    """
    file = _weights(folder)
    digest = content_digest([folder / CONFIG, file])
    settings = read_settings(folder)
    reader: TensorReader = SafetensorsCopy(file) if file.name == _SAFETENSORS else TorchFile(file)
    pairs = _pairs(reader, layout)
    largest = 0
    for (layer, projection), names in pairs.items():
        module = HF_NAMES[projection].format(i=layer)
        _check(reader, names, layout.projections()[projection], projection == EMBED, settings.rank_of(module))
        largest = max(largest, settings.rank_of(module))
    if largest > layout.max_rank:
        raise UnsupportedModelError(
            f"{folder}: the adapter has rank {largest}; the limit is {layout.max_rank} (--max-lora-rank)."
        )
    factors = {
        (layer, projection): _factors(reader, names, layout, settings, (layer, projection))
        for (layer, projection), names in pairs.items()
    }
    if content_digest([folder / CONFIG, file]) != digest:  # else its KV would be that of another content
        raise LoadError(f"the files of {folder} changed while they were read: load it again.")
    return Adapter(bytes.fromhex(digest), factors, settings.base_model)


def _weights(folder: Path) -> Path:
    for name in (_SAFETENSORS, _BIN):
        if (folder / name).is_file():
            return folder / name
    raise MissingFileError(f"There is no {_SAFETENSORS} or {_BIN} in {folder}.")


Pairs = dict[tuple[int, str], dict[str, str]]
"""Layer and projection -> names of the tensors that hold its factors A and B."""


def _pairs(reader: TensorReader, layout: Layout) -> Pairs:
    """Every tensor of the file at its place; LoadError for one that has none."""
    found: Pairs = {}
    places = _places(layout)
    file = reader.files[0]
    for name in sorted(reader.shapes):
        match = _FACTOR.fullmatch(name.removeprefix(_PREFIX))
        if match is None:
            raise UnsupportedModelError(f"{file}: the tensor {name} is no LoRA factor{_why(name)}.")
        place = places.get(match["module"])
        if place is None:
            raise UnsupportedModelError(f"{file}: {_unknown(match['module'], layout)}.")
        is_table = place[1] == EMBED
        if is_table != (match["table"] is not None):
            raise CorruptFileError(f"{file}: the tensor {name} has the name of another kind of module.")
        if place[1] in ("embed", "lm_head") and not layout.has_tables:
            raise UnsupportedModelError(
                f"{file}: the adapter changes {match['module']}; slots have room for that with --lora-embeddings only."
            )
        found.setdefault(place, {})[match["linear"] or match["table"]] = name
    if not found:
        raise CorruptFileError(f"{file} holds no LoRA factors.")
    for names in found.values():
        if len(names) < 2:
            raise CorruptFileError(f"{file}: {next(iter(names.values()))} stands alone; a factor needs its other one.")
    return found


def _places(layout: Layout) -> dict[str, tuple[int, str]]:
    """Path of every module that adapters may change -> its layer and projection."""
    inner = [name for name in layout.projections() if name in TARGETS]
    count = layout.model.num_layers
    places = {HF_NAMES[name].format(i=i): (i, name) for name in inner for i in range(count)}
    return places | {HF_NAMES[name]: (0, name) for name in ("embed", "lm_head")}


def _why(name: str) -> str:
    """Words for what is found where there should be factors."""
    if "lora_magnitude" in name:
        return ": it belongs to DoRA"
    if "modules_to_save" in name or name.endswith("base_layer.weight") or ".lora_" not in name:
        return ": weights of the base model are not replaced (save with save_embedding_layers=False)"
    return ""


def _unknown(module: str, layout: Layout) -> str:
    at = re.match(r"model\.layers\.(\d+)\.", module)
    count = layout.model.num_layers
    if at is not None and int(at[1]) >= count:
        return f"the adapter changes layer {at[1]}, but the model has the layers 0 to {count - 1}"
    known = ", ".join(HF_NAMES[name].split(".")[-1] for name in layout.projections())
    if len(layout.targets) < len(TARGETS):
        return f"the adapter changes {module}; slots have room for {known} only (--lora-target-modules)"
    return f"the adapter changes {module}, which is none of what it may change: {known}"


def _check(reader: TensorReader, names: Mapping[str, str], sizes: tuple[int, int], is_table: bool, rank: int) -> None:
    """ShapeMismatchError: the factors are not those of a module of the base model, or of another rank than stated."""
    size_in, size_out = sizes
    for which, expected in (("A", (rank, size_in)), ("B", (size_out, rank))):
        name, shape = names[which], tuple(reader.shapes[names[which]])
        if shape == expected:
            continue
        own_rank, size = (shape if which == "A" else shape[::-1]) if len(shape) == 2 else (0, 0)
        if size == sizes[which == "B"]:
            raise ShapeMismatchError(
                f"{reader.files[0]}: {name} has rank {own_rank}, but {CONFIG} says {rank} (r, rank_pattern)."
            )
        raise ShapeMismatchError(
            f"{reader.files[0]}: {name} has shape {list(shape)}, but this base model needs {list(expected)}: the "
            "adapter was made for another one."
        )


def _factors(
    reader: TensorReader, names: Mapping[str, str], layout: Layout, settings: PeftSettings, place: tuple[int, str]
) -> Factors:
    layer, projection = place
    scale = settings.scale_of(HF_NAMES[projection].format(i=layer))
    a = _converted(reader, names["A"], layout.dtype, 1.0)
    b = _converted(reader, names["B"], layout.dtype, scale)
    return Factors(np.ascontiguousarray(a.T) if projection == EMBED else a, np.ascontiguousarray(b.T))


def _converted(reader: TensorReader, name: str, dtype: np.dtype[Any], scale: float) -> np.ndarray[Any, np.dtype[Any]]:
    with np.errstate(over="ignore"):  # looked at below
        values = (reader.read(name).astype(np.float32) * np.float32(scale)).astype(dtype)
    if not _finite(values):
        raise LoadError(f"{reader.files[0]}: {name} has values that are not finite in {dtype.name}.")
    return values


def _finite(values: Iterable[Any]) -> bool:
    return bool(np.isfinite(np.asarray(values, np.float32)).all())
