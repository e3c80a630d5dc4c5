"""A model's tokenizer without the model, for clients that make prompts."""

from __future__ import annotations

from jaxserve.config import ModelOptions
from jaxserve.tokenizer import Tokenizer, load_tokenizer
from jaxserve.weights import open_model
from jaxserve.weights.hub import local_path, resolve_tokenizer

__all__ = ["open_tokenizer"]


def open_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a folder, GGUF file, hub id or alias; no weights are read or downloaded. Raises LoadError.

    The model need not be one that an engine could serve, unless its tokenizer is in a GGUF file.
    """
    path = local_path(name)
    on_hub = name.count("/") == 1 and not path.exists() and not name.startswith((".", "/", "~"))
    if on_hub or (path / "tokenizer.json").is_file():
        return load_tokenizer(resolve_tokenizer(name))
    opened = open_model(ModelOptions(model=name))
    return load_tokenizer(opened.tokenizer_path, opened.gguf_metadata, opened.chat_template)
