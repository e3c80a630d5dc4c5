"""The door of the room: from options to a model's configuration, and on request to its parameters.

Opening is cheap (headers and settings only), so that memory can be planned before any weight is read.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from jaxserve.config import ModelOptions
from jaxserve.errors import CorruptFileError, MissingFileError
from jaxserve.logging import get_logger
from jaxserve.models.config import ModelConfig
from jaxserve.models.hf_config import from_hf
from jaxserve.models.params import ParamTree
from jaxserve.models.registry import param_specs
from jaxserve.quantization import WeightForm
from jaxserve.sizing import all_specs
from jaxserve.weights.assemble import PLAIN, Params, Place, load_host, load_params, place_all, place_default
from jaxserve.weights.checkpoint import WeightCache, default_root
from jaxserve.weights.dummy import init_random
from jaxserve.weights.gguf import GGUFFile
from jaxserve.weights.hub import ModelFiles, resolve, resolve_tokenizer
from jaxserve.weights.reader import TensorReader, read_json
from jaxserve.weights.safetensors import SafetensorsReader
from jaxserve.weights.settings import block_kinds, config_of_gguf, config_of_reader, kept_kinds

__all__ = ["OpenedModel", "open_model"]

log = get_logger(__name__)


@dataclass(frozen=True)
class OpenedModel:
    """A model whose settings are known and whose weights can be loaded.

    Attributes:
        config: what it computes.
        files: where it lies.
        specs: its parameters (see models.params).
        gguf_metadata: key-value pairs of its GGUF file, None for another form.
        tokenizer_path: folder to read the tokenizer from, None to make it from ``gguf_metadata``.
        chat_template: text of the template that replaces the model's own, None to keep that.
    """

    config: ModelConfig
    files: ModelFiles
    specs: ParamTree
    gguf_metadata: dict[str, Any] | None
    tokenizer_path: Path | None
    chat_template: str | None
    _options: ModelOptions
    _reader: TensorReader | None

    @property
    def name(self) -> str:
        """The model as the user named it."""
        return self._options.model

    @property
    def has_random_weights(self) -> bool:
        """Whether its weights are made up, which can be done in any form."""
        return self._reader is None

    @property
    def kept_kinds(self) -> tuple[str, ...]:
        """Kinds of GGUF's quantised blocks among its matrices that can be kept in memory as they are."""
        if self._reader is None:
            return ()
        return kept_kinds(block_kinds(all_specs(self.specs), self._reader))

    def load(self, dtype: DTypeLike, place: Place = place_default, form: WeightForm = PLAIN) -> Params:
        """The parameters (see models.params); raises LoadError.

        Args:
            dtype: float32, bfloat16 or float16: of activations, and of all leaves that are floats.
            place: puts one host array on the device(s).
            form: which leaves the parameters become.
        """
        dtype = np.dtype(dtype).name
        if self._reader is None:
            with _timed("random weights"):
                return init_random(self.specs, dtype, self._options.seed, place, form)
        # The cache holds floats: it saves their conversion, which quantised leaves have no need of.
        cache = None if form.is_quantised else _cache(self._options, self.files)
        if cache is None:
            with _timed("weights"):
                return load_params(self.specs, self._reader, dtype, place, form)
        with _timed("digest of the weight files"):
            key = cache.key(self._reader.files, self.specs, dtype)
        with _timed("look-up of cached weights"):
            arrays = cache.fetch(key, self.specs, dtype)
        if arrays is None:
            with _timed("weights"):
                arrays = load_host(self.specs, self._reader, dtype)
            with _timed("caching of the converted weights"):
                cache.store(key, arrays)
        with _timed("placing of the weights"):
            return place_all(arrays, self.specs, dtype, place, form)


def open_model(options: ModelOptions) -> OpenedModel:
    """Find a model and read its settings; raises LoadError or ConfigError with what is wrong."""
    with _timed("look-up of the model"):
        files = resolve(options.model, options.revision, options.download_dir, options.load_format)
        tokenizer = _tokenizer_folder(files)
        if options.tokenizer is not None:
            tokenizer = resolve_tokenizer(options.tokenizer, download_dir=options.download_dir)
    template = _text(options.chat_template) if options.chat_template is not None else None
    with _timed("model settings"):
        gguf = GGUFFile(files.gguf) if files.gguf is not None else None
        reader, config = _from_gguf(gguf) if gguf is not None else _from_folder(files.folder, options.load_format)
        specs = param_specs(config, "gguf" if gguf is not None else "hf")
    if options.load_format == "dummy":
        reader = None
    metadata = gguf.metadata if gguf is not None else None
    return OpenedModel(config, files, specs, metadata, tokenizer, template, options, reader)


def _from_gguf(file: GGUFFile) -> tuple[TensorReader | None, ModelConfig]:
    return file, config_of_gguf(file)


def _from_folder(folder: Path | None, load_format: str) -> tuple[TensorReader | None, ModelConfig]:
    assert folder is not None
    generation = folder / "generation_config.json"
    config = from_hf(read_json(folder / "config.json"), read_json(generation) if generation.is_file() else None)
    if load_format == "dummy":
        return None, config
    reader = SafetensorsReader(folder)
    return reader, config_of_reader(config, reader)


def _cache(options: ModelOptions, files: ModelFiles) -> WeightCache | None:
    """The cache: for GGUF unless switched off; for safetensors, which are read as quickly, only where it is named."""
    if options.weight_cache_dir == "off" or (files.gguf is None and options.weight_cache_dir is None):
        return None
    return WeightCache(Path(options.weight_cache_dir).expanduser() if options.weight_cache_dir else default_root())


def _tokenizer_folder(files: ModelFiles) -> Path | None:
    """The model's own tokenizer files. Where they lie beside a GGUF file, they are more exact than its metadata."""
    if files.gguf is not None and (files.gguf.parent / "tokenizer.json").is_file():
        return files.gguf.parent
    return files.folder


def _text(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise MissingFileError(f"The chat template {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise CorruptFileError(f"The chat template {path} cannot be read: it is no UTF-8 text.") from error


@contextmanager
def _timed(what: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    log.info("%s: %.2f s", what, time.perf_counter() - start)
