"""The one public function, and the choice of who computes it."""

from __future__ import annotations

from collections.abc import Callable

import jax

from pallas_kernels.packed_matmul import cpu, reference, triton
from pallas_kernels.packed_matmul.format import PackedWeight
from pallas_kernels.selection import choose_backend

__all__ = ["Backend", "packed_matmul", "select_backend"]

Backend = Callable[[jax.Array, PackedWeight, int], jax.Array]
"""Same signature as ``packed_matmul`` without ``backend``."""

_BACKENDS: dict[str, Backend] = {
    "triton": triton.packed_matmul,
    "cpu": cpu.packed_matmul,
    "reference": reference.packed_matmul,
}


def select_backend(name: str, *, kind: str = "int4", activation_bits: int = 16) -> tuple[str, str]:
    """Name of the backend that will serve ``name`` ("auto" or a backend's own), and why it was taken.

    Args:
        name: what was asked for.
        kind: of the weights: "int4", "int8", or a float's name.
        activation_bits: see ``packed_matmul``.

    Raises:
        ValueError: there is no such backend, or it cannot be used here; the message says why.
    """
    refusals = {"triton": lambda: triton.refuse(kind, activation_bits), "cpu": cpu.refuse}
    return choose_backend(name, _BACKENDS, refusals, what="backend for packed weights", device=jax.default_backend())


def packed_matmul(
    x: jax.Array, weight: PackedWeight, *, activation_bits: int = 16, backend: str = "reference"
) -> jax.Array:
    """x [T, I] of any float dtype times a packed weight [I, O] -> [T, O] float32.

    Args:
        x: the left factor.
        weight: the right one; what it stands for is ``format.unpack``.
        activation_bits: 16, where x is multiplied as it is; or 8, where it is rounded to integers of 8 bits, with a
            scale per group of 32 inputs, before it is multiplied with a quantised weight.
        backend: who computes it (see ``select_backend``).

    Raises:
        ValueError: the backend cannot serve these arguments.
    """
    if activation_bits not in (8, 16):
        raise ValueError(f"activation_bits is 8 or 16, not {activation_bits}")
    return _BACKENDS[backend](x, weight, activation_bits)
