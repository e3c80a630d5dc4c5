"""Quantise weights to int8 on load: symmetric, a float16 scale per output and group of 32 inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxserve.errors import LoadError
from jaxserve.quantization.blocks import Blocks
from pallas_kernels.packed_matmul import GROUP

__all__ = ["quantize_int8"]

_MOST = 127


def quantize_int8(weight: NDArray[Any], name: str) -> Blocks:
    """Quantise a float weight [I, O], I a multiple of 32; no value is off by more than half its scale.

    Raises:
        LoadError: a group's scale does not fit float16; ``name`` says whose.
    """
    groups = weight.astype(np.float32, copy=False).reshape(-1, GROUP, weight.shape[1])
    largest = np.abs(groups).max(axis=1)
    scale = _half_upwards(largest / np.float32(_MOST))
    if not np.isfinite(scale).all():
        raise LoadError(f"{name} has values that int8 with float16 scales cannot hold; use --quantization none.")
    # Against the scale as it is stored: its rounding then costs nothing. A group of zeros has the scale 0.
    divisor = np.where(scale > 0, scale.astype(np.float32), 1)
    q = np.rint(groups / divisor[:, None]).astype(np.int8)
    return Blocks(q.reshape(weight.shape), scale, None)


def _half_upwards(values: NDArray[np.float32]) -> NDArray[np.float16]:
    """The nearest float16 that is not less, so that no quotient passes 127; infinite where there is none."""
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float16)
        return np.where(rounded < values, np.nextafter(rounded, np.float16(np.inf)), rounded)
