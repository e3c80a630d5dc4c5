"""What guesses, once it is known where it lies: a draft model, Medusa heads, or nothing that has weights.

Opening is cheap (settings and headers), so that all that cannot work is refused before the model's weights are read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxserve.config import ModelOptions
from jaxserve.engine.loading import load_heads, load_weights
from jaxserve.engine.speculation import SpeculativeSettings
from jaxserve.errors import ConfigError, LoadError
from jaxserve.models.config import ModelConfig
from jaxserve.speculative import (
    DraftModelProposer,
    MedusaProposer,
    NgramProposer,
    NoProposer,
    Proposer,
    SuffixProposer,
)
from jaxserve.tokenizer import Tokenizer, load_tokenizer
from jaxserve.weights import default_drafts, is_medusa, open_medusa, open_model

__all__ = ["OpenedDrafts", "open_drafts"]


@dataclass(frozen=True, slots=True)
class OpenedDrafts:
    """A proposer that can be made and whose weights can be loaded.

    Attributes:
        settings: what the flags ask for, with what only the files tell; None where nothing guesses.
        model: the draft model, which needs KV blocks beside those of the served one.
        load: its parameters, from the dtype of the served model's activations (a jax dtype).
        propose: makes the proposer, from the dtype of the KV and the attention backend.
        max_depth: most drafts on a path, None for chains.
    """

    settings: SpeculativeSettings | None
    model: ModelConfig | None
    load: Callable[[Any], Any]
    propose: Callable[[str, str], Proposer]
    max_depth: int | None = None

    @property
    def is_tree(self) -> bool:
        """Whether drafts may have siblings."""
        return self.settings is not None and self.max_depth is not None and self.max_depth < self.settings.num_drafts


def open_drafts(
    settings: SpeculativeSettings | None, options: ModelOptions, tokenizer: Tokenizer, model: ModelConfig
) -> OpenedDrafts:
    """What the settings ask for; ``options``, ``tokenizer`` and ``model`` are of the served model.

    Raises:
        ConfigError: it cannot be opened, or does not fit the model.
    """
    if settings is None:
        return OpenedDrafts(None, None, _nothing, lambda dtype, backend: NoProposer())
    if settings.method == "ngram":
        ngram = NgramProposer(settings.num_drafts, settings.longest, settings.shortest)
        return OpenedDrafts(settings, None, _nothing, lambda dtype, backend: ngram)
    if settings.method == "suffix":
        suffix = SuffixProposer(settings.num_drafts, settings.longest, settings.shortest, settings.corpus_size)
        return OpenedDrafts(settings, None, _nothing, lambda dtype, backend: suffix)
    if settings.method == "medusa" or (settings.model and is_medusa(settings.model, options.download_dir)):
        return _open_heads(settings, options, model)
    return _open_model(settings, options, tokenizer, model)


def _nothing(dtype: Any) -> None:
    """There are no weights."""


def _open_heads(settings: SpeculativeSettings, options: ModelOptions, model: ModelConfig) -> OpenedDrafts:
    source = settings.model or _trained("medusa", options.model)
    try:
        heads = open_medusa(source, options.download_dir)
    except LoadError as error:
        raise ConfigError(f"--speculative-model: {error}") from error
    num_drafts, most = settings.num_drafts, len(heads.paths)
    if settings.is_default:
        num_drafts = min(num_drafts, most)
    elif num_drafts > most:
        raise ConfigError(
            f"--num-speculative-tokens is {num_drafts}, but the {heads.num_heads} Medusa heads of {source} give "
            f"{most} drafts: set it to {most} or less."
        )
    proposer = MedusaProposer(heads.paths[:num_drafts])

    def load(dtype: Any) -> dict[str, Any]:
        try:
            return load_heads(options, heads, (model.hidden_size, model.vocab_size), dtype)
        except LoadError as error:
            raise ConfigError(
                f"--speculative-model: the heads of {source} were made for {heads.base_model} and do not fit "
                f"{options.model}: {error}"
            ) from error

    settings = replace(settings, method="medusa", num_drafts=num_drafts)
    return OpenedDrafts(settings, None, load, lambda dtype, backend: proposer, proposer.max_depth)


def _trained(method: str, model: str) -> str:
    """Where ``train-draft`` has put the heads of a model."""
    folder = default_drafts(method, model)
    if not (Path(folder) / "config.json").is_file():
        raise ConfigError(
            f"--speculative-model {method}: there are no trained heads for {model} in {folder}. Train some with: "
            f"jaxserve train-draft --method {method} {model} data.jsonl"
        )
    return str(folder)


def _open_model(
    settings: SpeculativeSettings, options: ModelOptions, tokenizer: Tokenizer, model: ModelConfig
) -> OpenedDrafts:
    assert settings.model is not None
    options = replace(options, model=settings.model, tokenizer=None, revision=None, load_format="auto")
    try:
        opened = open_model(options)
        own = load_tokenizer(opened.tokenizer_path, opened.gguf_metadata, None)
    except LoadError as error:
        raise ConfigError(f"--speculative-model: {error}") from error
    config = opened.config
    if config.vocab_size != model.vocab_size:
        raise ConfigError(
            f"--speculative-model: {settings.model} has a vocabulary of {config.vocab_size} tokens, the served "
            f"model one of {model.vocab_size}; drafts must be of the same vocabulary."
        )
    other = own.first_difference(tokenizer)
    if other is not None:
        raise ConfigError(
            f"--speculative-model: {settings.model} has another vocabulary: token {other} is {own.token(other)!r}, in "
            f"the served model {tokenizer.token(other)!r}."
        )
    num_drafts = settings.num_drafts
    return OpenedDrafts(
        settings,
        config,
        lambda dtype: load_weights(options, opened, dtype),
        lambda dtype, backend: DraftModelProposer(num_drafts, config, dtype, backend),
    )
