"""From checkpoint tensors to parameters on the device, one parameter at a time.

Everything is checked against the specs before the first byte is read, so that a wrong checkpoint fails at once. Then
each parameter is put together in one host array of its final shape and dtype, made a leaf, and let go. Quantised blocks
of a GGUF file that are kept never become floats on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from jaxserve.errors import CorruptFileError, LoadError, ShapeMismatchError
from jaxserve.logging import get_logger
from jaxserve.models.params import ParamTree
from jaxserve.models.spec import ParamSpec, Source, Transform
from jaxserve.quantization import KEPT_KINDS, Blocks, Leaf, LeafMaker, WeightForm, as_factor, from_gguf, merge
from jaxserve.weights.reader import RawBlocks, TensorReader

__all__ = ["PLAIN", "HostParams", "Params", "Place", "check", "load_host", "load_params", "place_all", "place_default"]

PLAIN = WeightForm()
Params = dict[str, Any]  # nested dicts and lists with leaves (see quantization.leaf)
HostParams = dict[str, Any]  # the same with numpy arrays
Array = np.ndarray[Any, np.dtype[Any]]
Place = Callable[[Array, ParamSpec], jax.Array]

log = get_logger(__name__)

# Written by some exporters, computed or unused here.
_IGNORED = (".rotary_emb.inv_freq", ".masked_bias", "rope_freqs.weight")
_MOST_NAMED = 3


def place_default(array: Array, spec: ParamSpec) -> jax.Array:
    """Put a parameter on the default device."""
    return jax.device_put(array)


def load_params(
    specs: ParamTree, reader: TensorReader, dtype: str, place: Place = place_default, form: WeightForm = PLAIN
) -> Params:
    """Read, transform, merge, cast and place every parameter.

    Args:
        specs: tree of ParamSpec (see models.params).
        reader: the checkpoint.
        dtype: dtype of the parameters, of those that are floats.
        place: puts a host array on the device(s); the array is not touched again afterwards.
        form: which leaves the parameters become.

    Raises:
        CorruptFileError: a tensor is not there.
        ShapeMismatchError: a tensor has another shape than the model's configuration asks for.
        LoadError: a value does not fit ``dtype``, or cannot be quantised.
    """
    make = LeafMaker(form, dtype, place)

    def build(spec: ParamSpec) -> Leaf:
        blocks = _kept_blocks(spec, reader, make) if make.keeps_blocks(spec) else None
        if blocks is not None:
            return make.of_blocks(blocks)
        return make.of_floats(_assemble(spec, reader, make.host_dtype(spec)), spec)

    params = _build_all(specs, reader, build)
    make.log_expanded()
    return params


def load_host(specs: ParamTree, reader: TensorReader, dtype: str) -> HostParams:
    """The parameters as plain arrays on the host, ready to be placed; raises what ``load_params`` does."""
    return _build_all(specs, reader, lambda spec: _assemble(spec, reader, np.dtype(dtype)))


def place_all(arrays: HostParams, specs: ParamTree, dtype: str, place: Place, form: WeightForm) -> Params:
    """Make leaves of host arrays, which are taken out of ``arrays`` and let go one by one; see ``load_params``."""
    make = LeafMaker(form, dtype, place)
    treedef = jax.tree.structure(arrays)
    waiting = jax.tree.leaves(arrays)[::-1]
    arrays.clear()
    placed = [make.of_floats(waiting.pop(), spec) for spec in jax.tree.leaves(specs)]
    params: Params = jax.tree.unflatten(treedef, placed)
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


def _build_all(specs: ParamTree, reader: TensorReader, build: Callable[[ParamSpec], Any]) -> dict[str, Any]:
    check(specs, reader)
    num_params = sum(1 for _ in _leaves(specs))
    with tqdm(total=num_params, desc="Loading weights", unit="param", disable=None, leave=False) as bar:

        def build_one(spec: ParamSpec) -> Any:
            built = build(spec)
            bar.update()
            return built

        built: dict[str, Any] = jax.tree.map(build_one, specs)
    return built


def _kept_blocks(spec: ParamSpec, reader: TensorReader, make: LeafMaker) -> Blocks | None:
    """The parameter [I, O] in its quantised form, None if a part of it has none that can be kept."""
    raws = [reader.raw(source.name) for source in spec.sources]
    kept: list[RawBlocks] = [raw for raw in raws if raw is not None and raw.kind in KEPT_KINDS]
    if len(kept) < len(raws):
        kinds = {"floats" if raw is None else raw.kind for raw in raws} - set(KEPT_KINDS)
        make.note_expanded(" and ".join(sorted(kinds)))
        return None
    # Neither transform touches the order of a row's inputs, so that its groups stay whole.
    parts = (
        from_gguf(raw.kind, raw.rows).map(partial(_transform, source=source))
        for raw, source in zip(kept, spec.sources, strict=True)
    )
    return merge([part.map(partial(as_factor, spec=spec)) for part in parts])


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
