"""Random weights that give finite, lively logits: for tests, benchmarks and trying out a shape without a download."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize

from jaxserve.models.params import ParamTree
from jaxserve.models.spec import ParamSpec
from jaxserve.quantization import Leaf, LeafMaker, WeightForm, as_factor, from_gguf
from jaxserve.weights.assemble import PLAIN, Array, Params, Place, place_default
from pallas_kernels.packed_matmul import GROUP

__all__ = ["init_random"]

_BLOCKS = GGMLQuantizationType.Q4_1


def init_random(
    specs: ParamTree, dtype: str, seed: int, place: Place = place_default, form: WeightForm = PLAIN
) -> Params:
    """Random parameters of the shapes in ``specs``; the same seed gives the same values.

    Norms are ones and biases zeros; a matrix is normal with variance 1 / fan-in, so that activations keep their size.
    Where GGUF's blocks are to be kept, it is rounded to those of Q4_1.
    """
    rng = np.random.default_rng(seed % 2**64)
    make = LeafMaker(form, dtype, place)

    def build(path: Any, spec: ParamSpec) -> Leaf:
        values = _values(path[-1].key, spec, rng)
        if make.keeps_blocks(spec):
            if spec.size_in % GROUP == 0:
                rows = quantize(as_factor(values, spec).T, _BLOCKS)
                return make.of_blocks(from_gguf(_BLOCKS.name, rows).map(np.transpose))
            make.note_expanded(f"inputs no multiple of {GROUP}")
        return make.of_floats(values.astype(make.host_dtype(spec)), spec)

    params: Params = jax.tree.map_with_path(build, specs)
    make.log_expanded()
    return params


def _values(name: str, spec: ParamSpec, rng: np.random.Generator) -> Array:
    if name.endswith("norm"):
        return np.ones(spec.shape, np.float32)
    if name.endswith("bias"):
        return np.zeros(spec.shape, np.float32)
    fan_in = spec.shape[1] if spec.axes[0] == "vocab" else spec.shape[0]
    return rng.standard_normal(spec.shape, np.float32) * np.float32(fan_in**-0.5)
