"""Weights into memory, in the form that suits the machine and the flags."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxserve.config import ModelOptions
from jaxserve.errors import ConfigError, ShapeMismatchError
from jaxserve.layers import embed
from jaxserve.logging import get_logger
from jaxserve.models.spec import ParamSpec, Source, Use
from jaxserve.quantization import KEPT_KINDS, LeafMaker, WeightForm, describe, has_quantised
from jaxserve.speculative import EagleHead, eagle_specs, medusa_specs
from jaxserve.weights import EagleFiles, MedusaHeads, OpenedModel, load_params, place_default
from pallas_kernels.packed_matmul import select_backend

__all__ = ["load_eagle", "load_heads", "load_weights"]

_log = get_logger(__name__)


def load_weights(options: ModelOptions, opened: OpenedModel, dtype: jnp.dtype) -> dict[str, Any]:
    """The parameters of a model. ConfigError: the flags ask for a form that it cannot have."""
    form = _weight_form(options, opened)
    params = opened.load(dtype, form=form)
    if form.activation_bits == 8 and not has_quantised(params):
        raise ConfigError(
            f"--activation-quantization int8 needs quantised weights, and --quantization {form.quantization} found no "
            f"matrix of {opened.name} that it could quantise. Leave it at none."
        )
    _log.info("weights of %s in memory: %s", opened.name, describe(params))
    return params


def load_heads(
    options: ModelOptions, heads: MedusaHeads, sizes: tuple[int, int], model: dict[str, Any], dtype: jnp.dtype
) -> dict[str, Any]:
    """The parameters of Medusa heads for a model of ``sizes`` (hidden size, vocabulary). LoadError: they do not fit.

    Heads of residual blocks alone use the output head of the model, whose parameters are ``model``.
    """
    hidden_size, num_tokens = sizes
    num_known = _num_known(heads.vocabulary, num_tokens)
    form = _draft_form(options)
    specs = medusa_specs(heads.num_heads, heads.num_layers, hidden_size, num_known if heads.has_tables else None)
    params = load_params({"heads": specs}, heads.reader, dtype.name, form=form)
    if not heads.has_tables:
        table = _own_table(model, heads.vocabulary, form, dtype)
        params["heads"] = [head | {"out": table} for head in params["heads"]]
    _log.info("%d Medusa heads in memory: %s", heads.num_heads, describe(params))
    return params | {"vocabulary": _placed(heads.vocabulary)}


def load_eagle(
    options: ModelOptions, files: EagleFiles, head: EagleHead, model: dict[str, Any], dtype: jnp.dtype
) -> dict[str, Any]:
    """The parameters of an EAGLE head, with what it takes from those of the model. LoadError: they do not fit."""
    num_known = _num_known(files.vocabulary, head.layer.vocab_size)
    form = _draft_form(options)
    params = load_params(eagle_specs(head, num_known), files.reader, dtype.name, form=form)
    if "out" not in params:
        params["out"] = _own_table(model, files.vocabulary, form, dtype)
    _log.info("EAGLE head in memory: %s", describe(params))
    return params | {"embed": model["embed"], "vocabulary": _placed(files.vocabulary)}


def _own_table(model: dict[str, Any], vocabulary: NDArray[np.int32] | None, form: WeightForm, dtype: jnp.dtype) -> Any:
    """The model's output head, or a table of the rows that a vocabulary names."""
    table = model.get("lm_head", model["embed"])
    if vocabulary is None:
        return table
    rows = np.asarray(embed(table, jnp.asarray(vocabulary)), np.float32)
    spec = ParamSpec(rows.shape, ("vocab", "embed"), (Source("lm_head.weight", rows.shape),), Use.LOGITS)
    make = LeafMaker(form, dtype.name, place_default)
    return make.of_floats(rows.astype(make.host_dtype(spec)), spec)


def _draft_form(options: ModelOptions) -> WeightForm:
    """How what guesses is held.

    Drafts need not be exact: where int8 saves time, which is where there are native kernels, they are int8 unless
    floats are asked for.
    """
    backend, _ = select_backend("auto", activation_bits=16)
    native = backend == "cpu"
    wanted = "int8" if native and options.quantization != "none" else "none"
    return WeightForm(wanted, packed=native, backend=backend)


def _num_known(vocabulary: NDArray[np.int32] | None, num_tokens: int) -> int:
    """How many tokens can be guessed. ShapeMismatchError: one that the model does not have."""
    if vocabulary is None:
        return num_tokens
    if vocabulary.max() >= num_tokens:
        raise ShapeMismatchError(f"its vocabulary has token {vocabulary.max()}, the model {num_tokens} tokens.")
    return len(vocabulary)


def _placed(vocabulary: NDArray[np.int32] | None) -> jax.Array | None:
    return None if vocabulary is None else jax.device_put(vocabulary)


def _weight_form(options: ModelOptions, opened: OpenedModel) -> WeightForm:
    """Which leaves the weights become. Without a native kernel they are plain, unless something else is asked for."""
    asked = options.quantization
    activation_bits = 8 if options.activation_quantization == "int8" else 16
    backend, why = select_backend("auto", activation_bits=activation_bits)
    if activation_bits == 8 and jax.default_backend() != "cpu":
        raise ConfigError(
            "--activation-quantization int8 is made for the CPU's native kernels, and the device is "
            f"{jax.default_backend()}: there every product would unpack its whole weight. Leave it at none."
        )
    native = backend == "cpu"  # on GPUs only quantised weights are packed, and only if that is asked for
    if asked == "gguf" and not (opened.kept_kinds or opened.has_random_weights):
        raise ConfigError(
            f"--quantization gguf keeps the blocks of a quantised GGUF file, but no matrix of {opened.name} is of a "
            f"kind that can be kept ({', '.join(KEPT_KINDS)}). Use auto, none or int8."
        )
    if asked == "auto":
        asked = "gguf" if native and opened.kept_kinds else "none"
    form = WeightForm(asked, packed=native, backend=backend, activation_bits=activation_bits)
    if activation_bits == 8 and not form.is_quantised:
        raise ConfigError(
            "--activation-quantization int8 needs quantised weights, and those of this model are floats: add "
            "--quantization int8 or, for a quantised GGUF file, --quantization gguf"
        )
    if native or (form.is_quantised and backend != "reference"):
        _log.info("products with packed weights: %s (%s)", backend, why)
    elif form.is_quantised:
        _log.warning(
            "--quantization %s saves memory here but no time: without a native kernel for %s every product unpacks its "
            "whole weight, which is slow",
            asked,
            jax.default_backend(),
        )
    return form
