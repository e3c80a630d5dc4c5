"""What guesses, once it is known where it lies: a draft model, heads of Medusa or EAGLE, or nothing with weights.

Opening is cheap (settings and headers), so that all that cannot work is refused before the model's weights are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxserve.config import ModelOptions
from jaxserve.engine.loading import eagle_head_specs, head_specs, load_eagle, load_heads, load_weights, table_spec
from jaxserve.engine.speculation import SpeculativeSettings
from jaxserve.errors import ConfigError, LoadError
from jaxserve.models.config import ModelConfig
from jaxserve.models.spec import ParamSpec
from jaxserve.speculative import (
    DraftModelProposer,
    EagleHead,
    EagleProposer,
    MedusaProposer,
    NgramProposer,
    NoProposer,
    Proposer,
    SuffixProposer,
)
from jaxserve.tokenizer import Tokenizer, load_tokenizer
from jaxserve.weights import default_drafts, is_eagle, is_medusa, open_eagle, open_medusa, open_model

__all__ = ["OpenedDrafts", "check_draft_model", "open_drafts", "open_heads"]


@dataclass(frozen=True, slots=True)
class OpenedDrafts:
    """A proposer that can be made and whose weights can be loaded.

    Attributes:
        settings: what the flags ask for, with what only the files tell; None where nothing guesses.
        model: what needs KV blocks beside those of the served model: a draft model, or the layer of a head.
        load: its parameters, from the dtype of the served model's activations (a jax dtype) and its parameters.
        propose: makes the proposer, from the dtype of the KV and the attention backend.
        max_depth: most drafts on a path, None for chains.
        taps: see ``Proposer``.
        specs: the parameters of heads that are not the model's own; empty for a draft model, which is a model itself.
        num_known: tokens that they say they know, 0 for all.
    """

    settings: SpeculativeSettings | None
    model: ModelConfig | None
    load: Callable[[Any, Any], Any]
    propose: Callable[[str, str], Proposer]
    max_depth: int | None = None
    taps: tuple[int, ...] | None = None
    specs: Callable[[], Any] = tuple
    num_known: int = 0

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
    return open_heads(settings, options, model) or _open_model(settings, options, tokenizer, model)


def open_heads(settings: SpeculativeSettings, options: ModelOptions, model: ModelConfig) -> OpenedDrafts | None:
    """Heads of Medusa or EAGLE; None if what is named is neither. Raises as ``open_drafts`` does."""
    if settings.method == "medusa" or (settings.model and is_medusa(settings.model, options.download_dir)):
        return _open_medusa(settings, options, model)
    if settings.method == "eagle" or (settings.model and is_eagle(settings.model, options.download_dir)):
        return _open_eagle(settings, options, model)
    return None


@contextmanager
def _refused(why: str = "") -> Iterator[None]:
    """What cannot be loaded was asked for by a flag; ``why`` comes before the reason."""
    try:
        yield
    except LoadError as error:
        raise ConfigError(f"--speculative-model: {why}{error}") from error


def _nothing(dtype: Any, params: Any) -> None:
    """There are no weights."""


def _open_medusa(settings: SpeculativeSettings, options: ModelOptions, model: ModelConfig) -> OpenedDrafts:
    source = settings.model or _trained("medusa", options.model)
    with _refused():
        heads = open_medusa(source, options.download_dir)
    num_drafts, most = settings.num_drafts, len(heads.paths)
    if settings.is_default:
        num_drafts = min(num_drafts, most)
    elif num_drafts > most:
        raise ConfigError(
            f"--num-speculative-tokens is {num_drafts}, but the {heads.num_heads} Medusa heads of {source} give "
            f"{most} drafts: set it to {most} or less."
        )
    proposer, sizes = MedusaProposer(heads.paths[:num_drafts]), (model.hidden_size, model.vocab_size)

    def load(dtype: Any, params: Any) -> dict[str, Any]:
        with _refused(f"the heads of {source} were made for {heads.base_model} and do not fit {options.model}: "):
            return load_heads(options, heads, sizes, params, dtype)

    return OpenedDrafts(
        replace(settings, method="medusa", num_drafts=num_drafts),
        None,
        load,
        lambda dtype, backend: proposer,
        proposer.max_depth,
        specs=lambda: [head_specs(heads, sizes), *_own_tables(heads.vocabulary, model, shared=not heads.has_tables)],
        num_known=0 if heads.vocabulary is None else len(heads.vocabulary),
    )


def _open_eagle(settings: SpeculativeSettings, options: ModelOptions, model: ModelConfig) -> OpenedDrafts:
    source = settings.model or _trained("eagle", options.model)
    with _refused():
        files = open_eagle(source, options.download_dir)
    for name in ("hidden_size", "vocab_size"):
        own, served = getattr(files.layer, name), getattr(model, name)
        if own != served:
            raise ConfigError(
                f"--speculative-model: the EAGLE head {source} does not fit {options.model}: its {name} is {own}, that "
                f"of the model {served}."
            )
    taps = (files.taps or _default_taps(model.num_layers)) if files.is_fused else ()
    if any(layer >= model.num_layers for layer in taps):
        raise ConfigError(
            f"--speculative-model: the EAGLE head {source} reads the layers {', '.join(map(str, taps))}, but "
            f"{options.model} has {model.num_layers}."
        )
    # How far the files say that the layer reaches is where its training ended: RoPE has no end.
    head = EagleHead(replace(files.layer, max_position=model.max_position), taps, files.has_bias)

    def load(dtype: Any, params: Any) -> dict[str, Any]:
        with _refused(f"the EAGLE head {source} does not fit {options.model}: "):
            return load_eagle(options, files, head, params, dtype)

    num_drafts, width, depth = settings.num_drafts, settings.width, settings.depth or settings.num_drafts
    return OpenedDrafts(
        replace(settings, method="eagle"),
        head.layer,
        load,
        lambda dtype, backend: EagleProposer(num_drafts, head, dtype, backend, width, depth),
        max_depth=depth if width > 1 else None,
        taps=taps,
        specs=lambda: [
            eagle_head_specs(files, head),
            *_own_tables(files.vocabulary, model, shared=not files.is_fused),
        ],
        num_known=0 if files.vocabulary is None else len(files.vocabulary),
    )


def _own_tables(vocabulary: NDArray[np.int32] | None, model: ModelConfig, *, shared: bool) -> list[ParamSpec]:
    """The table that heads without one make of the model's: only a vocabulary of their own needs another."""
    return [table_spec(vocabulary, model.hidden_size)] if shared and vocabulary is not None else []


def _default_taps(num_layers: int) -> tuple[int, int, int]:
    """Those that the authors of EAGLE-3 read: one near each end, and one in the middle."""
    return min(2, num_layers - 1), num_layers // 2, max(0, num_layers - 3)


def _trained(method: str, model: str) -> str:
    """Where ``train-draft`` has put the heads of a model."""
    folder = default_drafts(method, model)
    if not (Path(folder) / "config.json").is_file():
        raise ConfigError(
            f"--speculative-model {method}: there are no trained heads for {model} in {folder}. Train some with: "
            f"jaxserve train-draft --method {method} {model} data.jsonl"
        )
    return str(folder)


def check_draft_model(settings: SpeculativeSettings, draft: ModelConfig, model: ModelConfig) -> None:
    """ConfigError: a draft model does not fit the served one, or is asked for trees."""
    if draft.vocab_size != model.vocab_size:
        raise ConfigError(
            f"--speculative-model: {settings.model} has a vocabulary of {draft.vocab_size} tokens, the served "
            f"model one of {model.vocab_size}; drafts must be of the same vocabulary."
        )
    if settings.width > 1:
        raise ConfigError(
            f"--speculative-eagle-topk has no effect on the draft model {settings.model}: it is of eagle."
        )


def _open_model(
    settings: SpeculativeSettings, options: ModelOptions, tokenizer: Tokenizer, model: ModelConfig
) -> OpenedDrafts:
    assert settings.model is not None
    options = replace(options, model=settings.model, tokenizer=None, revision=None, load_format="auto")
    with _refused():
        opened = open_model(options)
        own = load_tokenizer(opened.tokenizer_path, opened.gguf_metadata, None)
    config = opened.config
    check_draft_model(settings, config, model)
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
        lambda dtype, params: load_weights(options, opened, dtype),
        lambda dtype, backend: DraftModelProposer(num_drafts, config, dtype, backend),
    )
