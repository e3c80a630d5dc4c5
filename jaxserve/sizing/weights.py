"""Bytes of parameters in memory, leaf by leaf.

Matrices that are packed lie in panels of 16 outputs, so that their last panel may hold columns of zeros; quantised ones
keep a float16 scale for 32 inputs of an output, and maybe an offset (``pallas_kernels.packed_matmul``; sizes are
written down again here, as that room needs jax, and a test holds them equal).

Letters: I inputs and O outputs of a matrix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from jaxserve.models.spec import ParamSpec
from jaxserve.sizing.forms import GROUP, Stored, WeightForm

__all__ = ["FLOAT_BYTES", "all_specs", "leaf_bytes", "weight_sizes"]

FLOAT_BYTES: Mapping[str, int] = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2})

_PANEL = 16  # outputs
_SCALE_BYTES = 2


def all_specs(tree: Any) -> Iterator[ParamSpec]:
    """The parameters of a tree of dicts and lists (``models.params.ParamTree``)."""
    if isinstance(tree, ParamSpec):
        yield tree
    else:
        for part in tree.values() if isinstance(tree, Mapping) else tree:
            yield from all_specs(part)


def leaf_bytes(spec: ParamSpec, how: Stored) -> int:
    """Bytes of a parameter on the device."""
    if not how.is_packed:
        return spec.size * FLOAT_BYTES[how.values]
    size_in = spec.size_in
    columns = -(-(spec.size // size_in) // _PANEL) * _PANEL
    if how.values in FLOAT_BYTES:
        return size_in * columns * FLOAT_BYTES[how.values]
    values = size_in * columns // (2 if how.values == "int4" else 1)
    return values + (1 + how.has_offset) * _SCALE_BYTES * (size_in // GROUP) * columns


def weight_sizes(
    specs: Iterable[ParamSpec], form: WeightForm, dtype: str, kinds: Mapping[str, str | None] | None = None
) -> dict[str, int]:
    """Bytes of parameters by how their values are stored, the largest share first; ``kinds`` by name of a tensor."""
    sizes: Counter[str] = Counter()
    for spec in specs:
        how = form.stored(spec, dtype, [(kinds or {}).get(source.name) for source in spec.sources])
        sizes[how.values] += leaf_bytes(spec, how)
    return dict(sizes.most_common())
