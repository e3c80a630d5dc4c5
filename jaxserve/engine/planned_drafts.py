"""What speculation would take, without a weight of what guesses: see ``drafts`` for the real thing."""

from __future__ import annotations

from dataclasses import replace

from jaxserve.config import ModelOptions
from jaxserve.engine.drafts import OpenedDrafts, check_draft_model, open_heads
from jaxserve.engine.loading import draft_form
from jaxserve.engine.speculation import SpeculativeSettings
from jaxserve.errors import ConfigError, LoadError
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import state_size
from jaxserve.models.spec import ParamSpec
from jaxserve.sizing import Drafts, Guesses, all_specs, choose_form, weight_sizes
from jaxserve.weights import ALIASES, kept_kinds, open_settings
from jaxserve.weights.hub import local_path

__all__ = ["plan_drafts"]


def plan_drafts(
    settings: SpeculativeSettings | None, options: ModelOptions, model: ModelConfig, dtype: str, backend: str
) -> Drafts:
    """What the settings ask for, beside the served ``model``.

    Args:
        settings: those of speculation, None for none.
        options: of the served model.
        model: what that computes.
        dtype: of activations.
        backend: who computes products with packed weights.

    Raises:
        ConfigError: it cannot be opened, or is on the hub and more than settings would have to be downloaded.
    """
    if settings is None:
        return Drafts()
    if settings.method in ("ngram", "suffix"):
        return Drafts(Guesses(settings.num_drafts, settings.num_drafts, corpus_size=settings.corpus_size))
    heads = _heads(settings, options, model)
    if heads is None:
        return _draft_model(settings, options, model, dtype, backend)
    assert heads.settings is not None
    num_drafts = heads.settings.num_drafts
    proposer = heads.propose(dtype, backend)
    sizes = weight_sizes(_specs(heads), draft_form(options, backend), dtype)
    if heads.num_known:
        sizes["int32"] = sizes.get("int32", 0) + 4 * heads.num_known
    guesses = Guesses(num_drafts, proposer.max_depth, proposer.is_tree, has_cache=proposer.has_cache)
    return Drafts(guesses, sizes, heads.model, state_size(model, heads.taps))


def _heads(settings: SpeculativeSettings, options: ModelOptions, model: ModelConfig) -> OpenedDrafts | None:
    """Heads, of which only headers are read; None if a draft model is asked for."""
    name = settings.model
    if name is not None and not _is_here(name):
        if settings.method in ("medusa", "eagle"):
            raise ConfigError(
                f"--speculative-model: the heads {name} are not on this machine; download them, and name their folder."
            )
        return None
    return open_heads(settings, options, model)


def _is_here(name: str) -> bool:
    return name in ALIASES or local_path(name).exists()


def _specs(heads: OpenedDrafts) -> list[ParamSpec]:
    try:
        return list(all_specs(heads.specs()))
    except LoadError as error:
        raise ConfigError(f"--speculative-model: {error}") from error


def _draft_model(
    settings: SpeculativeSettings, options: ModelOptions, model: ModelConfig, dtype: str, backend: str
) -> Drafts:
    assert settings.model is not None
    options = replace(options, model=settings.model, tokenizer=None, revision=None, load_format="auto")
    try:
        opened = open_settings(options)
    except LoadError as error:
        raise ConfigError(f"--speculative-model: {error}") from error
    if opened.config.num_layers == 1 and not _is_here(settings.model):
        raise ConfigError(
            f"--speculative-model: {settings.model} has one layer, as EAGLE heads do; download it, and name its folder."
        )
    check_draft_model(settings, opened.config, model)
    form = choose_form(options, kept_kinds(opened.kinds), backend=backend)
    guesses = Guesses(settings.num_drafts, settings.num_drafts, has_cache=True)
    return Drafts(guesses, weight_sizes(all_specs(opened.specs), form, dtype, opened.kinds), opened.config)
