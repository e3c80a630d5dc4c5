"""From checkpoint tensors to parameters on the device, one parameter at a time.

Everything is checked against the specs before the first byte is read, so that a wrong checkpoint fails at once. Then
each parameter is put together in one host array of its final shape and dtype, placed, and let go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from jaxserve.errors import CorruptFileError, LoadError, ShapeMismatchError
from jaxserve.logging import get_logger
from jaxserve.models.params import ParamTree
from jaxserve.models.spec import ParamSpec, Source, Transform
from jaxserve.weights.reader import TensorReader

__all__ = ["Params", "Place", "check", "load_params", "place_default"]

Params = dict[str, Any]  # nested dicts and lists with jax.Array leaves
Array = np.ndarray[Any, np.dtype[Any]]
Place = Callable[[Array, ParamSpec], jax.Array]

log = get_logger(__name__)

# Written by some exporters, computed or unused here.
_IGNORED = (".rotary_emb.inv_freq", ".masked_bias", "rope_freqs.weight")
_MOST_NAMED = 3


def place_default(array: Array, spec: ParamSpec) -> jax.Array:
    """Put a parameter on the default device."""
    return jax.device_put(array)


def load_params(specs: ParamTree, reader: TensorReader, dtype: str, place: Place = place_default) -> Params:
    """Read, transform, merge, cast and place every parameter.

    Args:
        specs: tree of ParamSpec (see models.params).
        reader: the checkpoint.
        dtype: dtype of the parameters.
        place: puts a host array on the device(s); the array is not touched again afterwards.

    Raises:
        CorruptFileError: a tensor is not there.
        ShapeMismatchError: a tensor has another shape than the model's configuration asks for.
        LoadError: a value does not fit ``dtype``.
    """
    check(specs, reader)
    num_params = sum(1 for _ in _leaves(specs))
    with tqdm(total=num_params, desc="Loading weights", unit="param", disable=None, leave=False) as bar:

        def build(spec: ParamSpec) -> jax.Array:
            array = place(_assemble(spec, reader, np.dtype(dtype)), spec)
            bar.update()
            return array

        params: Params = jax.tree.map(build, specs)
    return params


def check(specs: ParamTree, reader: TensorReader) -> None:
    """Raise CorruptFileError or ShapeMismatchError where ``reader`` is not the checkpoint that ``specs`` describe."""
    used = set()
    for source in (s for spec in _leaves(specs) for s in spec.sources):
        shape = reader.shapes.get(source.name)
        if shape is None:
            raise CorruptFileError(f"The tensor {source.name} is not in {_named(p.name for p in reader.files)}.")
        if shape != source.shape:
            raise ShapeMismatchError(
                f"The tensor {source.name} has shape {list(shape)}; the configuration asks for {list(source.shape)}."
            )
        used.add(source.name)
    unused = sorted(name for name in reader.shapes if name not in used and not name.endswith(_IGNORED))
    if unused:
        log.warning("%d tensors of the checkpoint are not used: %s.", len(unused), _named(unused))


def _assemble(spec: ParamSpec, reader: TensorReader, dtype: np.dtype[Any]) -> Array:
    """The parameter as one new host array of shape ``spec.shape``."""
    out = np.empty(spec.shape, dtype)
    start = 0
    for source in spec.sources:
        part = _transform(reader.read(source.name), source)
        stop = start + part.shape[-1]
        with np.errstate(over="ignore"):  # looked at below
            out[..., start:stop] = part
        if dtype == np.float16 and not np.isfinite(out[..., start:stop]).all():
            raise LoadError(
                f"The tensor {source.name} has values that float16 cannot hold; use dtype bfloat16 or float32."
            )
        start = stop
    return out


def _transform(tensor: Array, source: Source) -> Array:
    if source.transform in (Transform.UNPERMUTE, Transform.UNPERMUTE_TRANSPOSE):
        # Rows of a head alternate between the two halves, [D/2, 2]; RoPE here wants one half after the other, [2, D/2].
        pairs = tensor.reshape(source.heads, -1, 2, *tensor.shape[1:])
        tensor = pairs.swapaxes(1, 2).reshape(tensor.shape)
    if source.transform in (Transform.TRANSPOSE, Transform.UNPERMUTE_TRANSPOSE):
        tensor = tensor.T
    return tensor


def _leaves(specs: ParamTree) -> Iterator[ParamSpec]:
    yield from jax.tree.leaves(specs)


def _named(names: Any) -> str:
    """The first few names, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - _MOST_NAMED} more" if len(listed) > _MOST_NAMED else ""
    return ", ".join(listed[:_MOST_NAMED]) + more
