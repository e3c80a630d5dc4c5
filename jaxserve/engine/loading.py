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
from jaxserve.models.params import ParamTree
from jaxserve.models.spec import ParamSpec, Source, Use
from jaxserve.quantization import LeafMaker, WeightForm, describe, has_quantised
from jaxserve.sizing import check_rounding, choose_form
from jaxserve.speculative import EagleHead, eagle_specs, medusa_specs
from jaxserve.weights import EagleFiles, MedusaHeads, OpenedModel, load_params, place_default
from pallas_kernels import native
from pallas_kernels.packed_matmul import select_backend

__all__ = [
    "draft_form",
    "eagle_head_specs",
    "head_specs",
    "load_eagle",
    "load_heads",
    "load_weights",
    "products_backend",
    "table_spec",
]

_log = get_logger(__name__)


def load_weights(options: ModelOptions, opened: OpenedModel, dtype: jnp.dtype) -> dict[str, Any]:
    """The parameters of a model. ConfigError: the flags ask for a form that it cannot have."""
    form = _weight_form(options, opened)
    params = opened.load(dtype, form=form)
    check_rounding(form, opened.name, has_quantised=has_quantised(params))
    _log.info("weights of %s in memory: %s", opened.name, describe(params))
    return params


def load_heads(
    options: ModelOptions, heads: MedusaHeads, sizes: tuple[int, int], model: dict[str, Any], dtype: jnp.dtype
) -> dict[str, Any]:
    """The parameters of Medusa heads for a model of ``sizes`` (hidden size, vocabulary). LoadError: they do not fit.

    Heads of residual blocks alone use the output head of the model, whose parameters are ``model``.
    """
    form = draft_form(options, select_backend("auto")[0])
    params = load_params({"heads": head_specs(heads, sizes)}, heads.reader, dtype.name, form=form)
    if not heads.has_tables:
        table = _own_table(model, heads.vocabulary, form, dtype)
        params["heads"] = [head | {"out": table} for head in params["heads"]]
    _log.info("%d Medusa heads in memory: %s", heads.num_heads, describe(params))
    return params | {"vocabulary": _placed(heads.vocabulary)}


def head_specs(heads: MedusaHeads, sizes: tuple[int, int]) -> list[ParamTree]:
    """What is read of Medusa heads for a model of ``sizes``. ShapeMismatchError: they know tokens that it has not."""
    hidden_size, num_tokens = sizes
    num_known = _num_known(heads.vocabulary, num_tokens)
    return medusa_specs(heads.num_heads, heads.num_layers, hidden_size, num_known if heads.has_tables else None)


def eagle_head_specs(files: EagleFiles, head: EagleHead) -> ParamTree:
    """What is read of an EAGLE head. ShapeMismatchError: it knows tokens that the model has not."""
    return eagle_specs(head, _num_known(files.vocabulary, head.layer.vocab_size))


def table_spec(vocabulary: NDArray[np.int32], hidden_size: int) -> ParamSpec:
    """The rows of a model's output head that a vocabulary names."""
    shape = (len(vocabulary), hidden_size)
    return ParamSpec(shape, ("vocab", "embed"), (Source("lm_head.weight", shape),), Use.LOGITS)


def load_eagle(
    options: ModelOptions, files: EagleFiles, head: EagleHead, model: dict[str, Any], dtype: jnp.dtype
) -> dict[str, Any]:
    """The parameters of an EAGLE head, with what it takes from those of the model. LoadError: they do not fit."""
    form = draft_form(options, select_backend("auto")[0])
    params = load_params(eagle_head_specs(files, head), files.reader, dtype.name, form=form)
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
    spec = table_spec(vocabulary, rows.shape[1])
    make = LeafMaker(form, dtype.name, place_default)
    return make.of_floats(rows.astype(make.host_dtype(spec)), spec)


def products_backend(*, on_cpu: bool) -> str:
    """Who computes products with packed weights on a CPU like this machine's, or on a GPU: what ``select_backend``
    takes there, without asking for a device."""
    if not on_cpu:
        return "triton"
    return "cpu" if native.missing() is None else "reference"


def draft_form(options: ModelOptions, backend: str) -> WeightForm:
    """How what guesses is held.

    Drafts need not be exact: where int8 saves time, which is where there are native kernels, they are int8 unless
    floats are asked for.
    """
    is_native = backend == "cpu"
    wanted = "int8" if is_native and options.quantization != "none" else "none"
    return WeightForm(wanted, packed=is_native, backend=backend)


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
    activation_bits = 8 if options.activation_quantization == "int8" else 16
    backend, why = select_backend("auto", activation_bits=activation_bits)
    if activation_bits == 8 and jax.default_backend() != "cpu":
        raise ConfigError(
            "--activation-quantization int8 is made for the CPU's native kernels, and the device is "
            f"{jax.default_backend()}: there every product would unpack its whole weight. Leave it at none."
        )
    random = opened.has_random_weights
    form = choose_form(options, opened.kept_kinds, backend=backend, has_random_weights=random)
    if form.packed or (form.is_quantised and backend != "reference"):
        _log.info("products with packed weights: %s (%s)", backend, why)
    elif form.is_quantised:
        _log.warning(
            "--quantization %s saves memory here but no time: without a native kernel for %s every product unpacks its "
            "whole weight, which is slow",
            form.quantization,
            jax.default_backend(),
        )
    return form
