"""CPU backend: a C++ kernel that reads each panel once (``native/src/matmul.h``).

Every element is one chain of sums over the inputs (or their groups) in order: a row's result does not depend on the
rows beside it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import native
from pallas_kernels.packed_matmul.format import PackedWeight

__all__ = ["packed_matmul", "refuse"]


def refuse() -> str | None:
    """Why it cannot be used here; None if it can."""
    return "it runs on the CPU only" if jax.default_backend() != "cpu" else native.missing()


def packed_matmul(x: jax.Array, weight: PackedWeight, activation_bits: int) -> jax.Array:
    """See ``api.packed_matmul``."""
    native.load()
    none = np.zeros(0, np.float16)
    return jax.ffi.ffi_call("jaxserve_matmul", jax.ShapeDtypeStruct((x.shape[0], weight.size_out), jnp.float32))(
        x,
        weight.data,
        none if weight.scale is None else weight.scale,
        none if weight.offset is None else weight.offset,
        activation_bits=np.int64(activation_bits),
    )
