"""Which leaf a parameter becomes.

Norms and biases, and a table that is only looked up, are plain arrays. Matrices and the table of the logits become what
the form asks for; one that cannot be quantised is a leaf of floats, and is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from jaxserve.logging import get_logger
from jaxserve.models.spec import ParamSpec, Use
from jaxserve.quantization.blocks import Blocks
from jaxserve.quantization.int8 import quantize_int8
from jaxserve.quantization.leaf import Leaf, PackedLeaf
from jaxserve.sizing import WeightForm
from pallas_kernels.packed_matmul import GROUP, PackedWeight, pack

__all__ = ["LeafMaker", "as_factor"]

_log = get_logger(__name__)

Array = NDArray[Any]


class LeafMaker:
    """Makes leaves of one form.

    Args:
        form: the form.
        dtype: of float leaves, and of activations.
        place: puts a plain array on the device(s). Packed ones go to the default device.
    """

    def __init__(self, form: WeightForm, dtype: str, place: Callable[[Array, ParamSpec], jax.Array]) -> None:
        self._form = form
        self._dtype = np.dtype(dtype)
        self._place = place
        self._num_quantised = 0
        self._expanded: Counter[str] = Counter()

    def keeps_blocks(self, spec: ParamSpec) -> bool:
        """Whether GGUF's blocks are wanted for a parameter, where the file has them."""
        return self._form.keeps_blocks(spec)

    def host_dtype(self, spec: ParamSpec) -> np.dtype[Any]:
        """The dtype in which ``of_floats`` wants a parameter."""
        return np.dtype(np.float32) if self._form.makes_int8(spec) else self._dtype

    def of_floats(self, array: Array, spec: ParamSpec) -> Leaf:
        """The leaf of a parameter [I, O], or [V, E] of a table; raises LoadError if it cannot be quantised."""
        if self._form.makes_int8(spec):
            return self.of_blocks(quantize_int8(as_factor(array, spec), spec.sources[0].name))
        if self._form.quantization == "int8" and spec.is_factor:
            self.note_expanded(f"inputs no multiple of {GROUP}")
        if self._form.packs(spec):
            return self._packed(pack(as_factor(array, spec)))
        return self._place(array, spec)

    def of_blocks(self, blocks: Blocks) -> PackedLeaf:
        """The leaf of a quantised parameter [I, O]."""
        self._num_quantised += 1
        return self._packed(blocks.pack())

    def note_expanded(self, why: str) -> None:
        """A parameter that was to be quantised becomes floats."""
        self._expanded[why] += 1

    def log_expanded(self) -> None:
        """One line about what could not be quantised, if anything."""
        count = self._expanded.total()
        if count:
            whys = ", ".join(f"{n} for {why}" for why, n in self._expanded.most_common())
            total = count + self._num_quantised
            _log.info("%d of %d matrices cannot be quantised and are %s (%s)", count, total, self._dtype.name, whys)

    def _packed(self, weight: PackedWeight) -> PackedLeaf:
        return PackedLeaf(jax.device_put(weight), self._form.backend, self._dtype, self._form.activation_bits)


def as_factor(array: Array, spec: ParamSpec) -> Array:
    """A parameter as the right factor [I, O] of its product: of a table [V, E], [E, V]."""
    return array.T if spec.use is Use.LOGITS else array
