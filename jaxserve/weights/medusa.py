"""Medusa heads on disk, in the form of the authors (https://github.com/FasterDecoding/Medusa).

A folder or hub model with a ``config.json`` (``medusa_num_heads``, ``medusa_num_layers``, ``base_model_name_or_path``)
and ``medusa_lm_head.pt`` or ``.safetensors``, whose tensors are named ``0.0.linear.weight`` (head 0, layer 0). Where
heads have no table ``0.1.weight`` behind their layers, they are read through the model's own output head.
Two more entries are ours: ``medusa_vocabulary``, the token that each logit of a head means, where these are not all
tokens, and ``medusa_choices``, the paths of ranks that are worth a try, the most promising first.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from jaxserve.errors import CorruptFileError, LoadError, MissingFileError
from jaxserve.weights.drafts import read_vocabulary
from jaxserve.weights.hub import ALIASES, fetch_folder, local_path
from jaxserve.weights.reader import TensorReader, read_json
from jaxserve.weights.safetensors import SafetensorsReader
from jaxserve.weights.torch_file import TorchFile

__all__ = ["MedusaHeads", "is_medusa", "open_medusa", "save_medusa"]

_WEIGHTS = "medusa_lm_head"
_MOST_HEADS, _MOST_LAYERS, _MOST_RANKS = 64, 16, 64


@dataclass(frozen=True)
class MedusaHeads:
    """Heads whose settings are known and whose weights can be read.

    Attributes:
        num_heads, num_layers: how many, and residual blocks of each.
        base_model: the model that they were trained for, as its trainer named it.
        vocabulary: [W] int32, the token of each logit; None for all tokens in order.
        paths: paths of ranks (see ``speculative.medusa``), the most promising first; the chain of all heads if there
            are no others.
        reader: their tensors.
    """

    num_heads: int
    num_layers: int
    base_model: str
    vocabulary: NDArray[np.int32] | None
    paths: tuple[tuple[int, ...], ...]
    reader: TensorReader

    @property
    def has_tables(self) -> bool:
        """Whether they have output heads of their own."""
        names = (f"{head}.{self.num_layers}.weight" for head in range(self.num_heads))
        return not self.num_layers or any(name in self.reader.shapes for name in names)


def is_medusa(model: str, download_dir: str | None = None) -> bool:
    """Whether a folder or hub model says of itself that it holds Medusa heads."""
    path = local_path(model)
    if model in ALIASES or path.is_file():
        return False
    try:
        return "medusa_num_heads" in read_json(fetch_folder(model, ("config.json",), download_dir) / "config.json")
    except LoadError:  # whoever opens it as a model says what is wrong with it
        return False


def open_medusa(model: str, download_dir: str | None = None) -> MedusaHeads:
    """Find heads and read their settings; raises LoadError with what is wrong."""
    folder = fetch_folder(model, ("config.json", f"{_WEIGHTS}.*"), download_dir)
    path = folder / "config.json"
    config = read_json(path)
    reader: TensorReader
    if (folder / f"{_WEIGHTS}.safetensors").is_file():
        reader = SafetensorsReader(folder)
    elif (folder / f"{_WEIGHTS}.pt").is_file():
        reader = TorchFile(folder / f"{_WEIGHTS}.pt")
    else:
        raise MissingFileError(f"There is no {_WEIGHTS}.safetensors or {_WEIGHTS}.pt in {folder}.")
    num_heads = _count(config, "medusa_num_heads", path, 1, _MOST_HEADS)
    return MedusaHeads(
        num_heads,
        _count(config, "medusa_num_layers", path, 0, _MOST_LAYERS),
        str(config.get("base_model_name_or_path")),
        read_vocabulary(config, "medusa_vocabulary", path),
        _paths(config, path, num_heads),
        reader,
    )


def save_medusa(
    folder: Path,
    heads: Sequence[Any],
    base_model: str,
    vocabulary: NDArray[np.int32] | None,
    notes: dict[str, Any],
) -> None:
    """Write heads (arrays in the form of ``speculative.medusa_specs``); ``notes`` are added to the settings."""
    tensors: dict[str, NDArray[np.float32]] = {}
    for i, head in enumerate(heads):
        for j, block in enumerate(head["blocks"]):
            tensors[f"{i}.{j}.linear.weight"] = np.ascontiguousarray(np.asarray(block["weight"], np.float32).T)
            tensors[f"{i}.{j}.linear.bias"] = np.asarray(block["bias"], np.float32)
        tensors[f"{i}.{len(head['blocks'])}.weight"] = np.asarray(head["out"], np.float32)
    config: dict[str, Any] = {
        "medusa_num_heads": len(heads),
        "medusa_num_layers": len(heads[0]["blocks"]),
        "base_model_name_or_path": base_model,
        **notes,
    }
    if vocabulary is not None:
        config["medusa_vocabulary"] = vocabulary.tolist()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / f"{_WEIGHTS}.safetensors")
    (folder / "config.json").write_text(json.dumps(config) + "\n", encoding="utf-8")


def _count(config: dict[str, Any], name: str, path: Path, low: int, high: int) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise CorruptFileError(f"{path}: {name} must be an integer from {low} to {high}, got {value!r}.")
    return value


def _paths(config: dict[str, Any], file: Path, num_heads: int) -> tuple[tuple[int, ...], ...]:
    given = config.get("medusa_choices")
    if given is None:
        return tuple((0,) * depth for depth in range(1, num_heads + 1))
    known: set[tuple[int, ...]] = {()}
    for path in given if isinstance(given, list) else [None]:
        ranks = tuple(path) if isinstance(path, list) else ()
        legal = all(type(rank) is int and 0 <= rank < _MOST_RANKS for rank in ranks)
        if not (legal and 0 < len(ranks) <= num_heads) or ranks in known or ranks[:-1] not in known:
            raise CorruptFileError(
                f"{file}: medusa_choices must be distinct paths of up to {num_heads} ranks below {_MOST_RANKS}, each "
                f"after its beginning; {path!r} is not."
            )
        known.add(ranks)
    return tuple(tuple(path) for path in given)
