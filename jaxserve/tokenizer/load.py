"""Where tokenizers come from: a Hugging Face folder, or the metadata of a GGUF file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jinja2

from jaxserve.errors import ConfigError, LoadError, MissingFileError
from jaxserve.tokenizer.gguf_vocab import from_gguf
from jaxserve.tokenizer.tokenizer import Tokenizer

__all__ = ["load_tokenizer"]


def load_tokenizer(
    path: str | os.PathLike[str] | None = None,
    gguf_metadata: Mapping[str, Any] | None = None,
    chat_template: str | None = None,
) -> Tokenizer:
    """Load a tokenizer from a folder, or, without one, from GGUF metadata.

    Args:
        path: folder with tokenizer.json (or what transformers can convert).
        gguf_metadata: metadata keys and values of a GGUF file; used if ``path`` is None.
        chat_template: Jinja file, or the template itself, that replaces the model's.

    Raises LoadError (if known, its kind: MissingFileError, CorruptFileError, UnsupportedModelError), and ConfigError if
    both sources are None.
    """
    eos_token_ids: tuple[int, ...] = ()
    if path is not None:
        hf = _from_folder(os.fspath(path))
    elif gguf_metadata is not None:
        hf, eos_token_ids = from_gguf(gguf_metadata)
    else:
        raise ConfigError("tokenizer: neither a folder nor GGUF metadata was given.")
    if chat_template is not None:
        hf.chat_template = _read_template(chat_template)
        _check_syntax(hf)
    return Tokenizer(hf, eos_token_ids)


def _from_folder(path: str) -> Any:
    if not os.path.isdir(path):
        raise MissingFileError(f"tokenizer folder {path} is not there.")
    # Here and not above: it imports for seconds, and a GGUF's tokenizer does not need it.
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # the library raises many kinds, down to bare Exception, for unreadable files
        raise LoadError(f"the tokenizer in {path} cannot be loaded: {error}") from error


def _check_syntax(hf: Any) -> None:
    """Find out now what otherwise every chat would be refused for."""
    try:
        hf.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"the chat template is not valid Jinja: line {error.lineno}: {error.message}.") from error
    except Exception:  # a template may refuse these messages and take others
        return


def _read_template(template: str) -> str:
    if any(mark in template for mark in ("{{", "{%", "\n")):
        return template
    try:
        with open(template, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise MissingFileError(f"chat_template {template} cannot be read: {error.strerror}.") from error
