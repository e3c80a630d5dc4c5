"""Random weights that give finite, lively logits: for tests, benchmarks and trying out a shape without a download."""

from __future__ import annotations

import jax
import numpy as np

from jaxserve.models.params import ParamTree
from jaxserve.models.spec import ParamSpec
from jaxserve.weights.assemble import Array, Params, Place, place_default

__all__ = ["init_random"]


def init_random(specs: ParamTree, dtype: str, seed: int, place: Place = place_default) -> Params:
    """Random parameters of the shapes in ``specs``; the same seed gives the same values.

    Norms are ones and biases zeros; a matrix is normal with variance 1 / fan-in, so that activations keep their size.
    """
    rng = np.random.default_rng(seed)
    params: Params = jax.tree.map_with_path(
        lambda path, spec: place(_values(path[-1].key, spec, rng).astype(dtype), spec), specs
    )
    return params


def _values(name: str, spec: ParamSpec, rng: np.random.Generator) -> Array:
    if name.endswith("norm"):
        return np.ones(spec.shape, np.float32)
    if name.endswith("bias"):
        return np.zeros(spec.shape, np.float32)
    fan_in = spec.shape[1] if spec.axes[0] == "vocab" else spec.shape[0]
    return rng.standard_normal(spec.shape, np.float32) * np.float32(fan_in**-0.5)
