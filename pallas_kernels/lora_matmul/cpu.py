"""CPU backend: C++ kernels that read the ranks of each slot once per few tokens (``native/src/lora.h``).

XLA's gather copies an adapter per token before it multiplies. Every element here is one chain of sums in a fixed order:
a token's result does not depend on the tokens beside it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import native
from pallas_kernels.lora_matmul.plan import LoraPlan
from pallas_kernels.lora_matmul.weights import LoraWeights

__all__ = ["lora_matmul", "refuse"]


def refuse() -> str | None:
    """Why it cannot be used here; None if it can."""
    return "it runs on the CPU only" if jax.default_backend() != "cpu" else native.missing()


def lora_matmul(x: jax.Array, weights: LoraWeights, layer: jax.Array, plan: LoraPlan) -> jax.Array:
    """See ``api.lora_matmul``."""
    native.load()
    out = jax.ffi.ffi_call("jaxserve_lora", jax.ShapeDtypeStruct((x.shape[0], weights.b.shape[3]), jnp.float32))(
        x,
        weights.a,
        weights.b,
        weights.ranks,
        plan.slots,
        jnp.asarray(layer, jnp.int32),
        parts=np.array(weights.parts, np.int64),
    )
    assert isinstance(out, jax.Array)
    return out
