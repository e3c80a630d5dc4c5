"""What a model is, without its weights: from config.json or the header of a GGUF file, and of safetensors where they
are there.

Of a model on the hub only its settings are downloaded. A GGUF file is not: its header cannot be had without the rest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from jaxserve.config import ModelOptions
from jaxserve.errors import LoadError
from jaxserve.models.config import ModelConfig
from jaxserve.models.gguf_config import ROPE_FACTORS, from_gguf
from jaxserve.models.hf_config import from_hf
from jaxserve.models.params import ParamTree
from jaxserve.models.registry import param_specs
from jaxserve.models.spec import ParamSpec
from jaxserve.sizing import GGUF_BLOCKS, all_specs
from jaxserve.weights.gguf import GGUFFile
from jaxserve.weights.hub import ModelFiles, local_path, resolve_settings
from jaxserve.weights.reader import TensorReader, read_json
from jaxserve.weights.safetensors import SafetensorsReader, has_safetensors

__all__ = ["ModelSettings", "block_kinds", "config_of_gguf", "config_of_reader", "kept_kinds", "open_settings"]


@dataclass(frozen=True)
class ModelSettings:
    """A model whose weights nobody has looked at.

    Attributes:
        config: what it computes.
        specs: its parameters (see models.params).
        kinds: GGML's name of each quantised tensor that its matrices are made of.
    """

    config: ModelConfig
    specs: ParamTree
    kinds: Mapping[str, str]


def open_settings(options: ModelOptions) -> ModelSettings:
    """Find a model and read its settings; its name may be that of a config.json, too. LoadError or ConfigError: it
    cannot be served, and why."""
    path = local_path(options.model)
    if path.suffix == ".json" and path.is_file():
        files = ModelFiles(folder=path.parent)
    else:
        files = resolve_settings(options.model, options.revision, options.download_dir, options.load_format)
        path = (files.folder or Path()) / "config.json"
    if files.gguf is not None:
        gguf = GGUFFile(files.gguf)
        config = config_of_gguf(gguf)
        specs = param_specs(config, "gguf")
        return ModelSettings(config, specs, block_kinds(all_specs(specs), gguf))
    assert files.folder is not None
    generation = files.folder / "generation_config.json"
    config = from_hf(read_json(path), read_json(generation) if generation.is_file() else None)
    if options.load_format != "dummy" and has_safetensors(files.folder):
        with suppress(LoadError):  # weights that are not all there: the dtype is that of config.json
            config = config_of_reader(config, SafetensorsReader(files.folder))
    return ModelSettings(config, param_specs(config, "hf"), {})


def config_of_gguf(file: GGUFFile) -> ModelConfig:
    """What a GGUF file's model computes."""
    factors = file.read(ROPE_FACTORS).tolist() if ROPE_FACTORS in file.shapes else None
    return from_gguf(file.metadata, file.shapes, factors, file.main_dtype())


def config_of_reader(config: ModelConfig, reader: TensorReader) -> ModelConfig:
    """``config`` with the dtype that the weights have: that in config.json is at times the one of training."""
    first = param_specs(config, "hf")["embed"].sources[0].name
    return dataclasses.replace(config, checkpoint_dtype=reader.dtype(first)) if first in reader.shapes else config


def block_kinds(specs: Iterable[ParamSpec], reader: TensorReader) -> dict[str, str]:
    """GGML's name of each quantised tensor among those that matrices are made of."""
    names = (source.name for spec in specs if spec.is_factor for source in spec.sources)
    raws = {name: reader.raw(name) for name in names if name in reader.shapes}
    return {name: raw.kind for name, raw in raws.items() if raw is not None}


def kept_kinds(kinds: Mapping[str, str]) -> tuple[str, ...]:
    """Those of the kinds that can be kept in memory as they are."""
    return tuple(sorted(set(kinds.values()) & set(GGUF_BLOCKS)))
