"""The one public function, and the choice of who computes it."""

from __future__ import annotations

from collections.abc import Callable

import jax

from pallas_kernels.lora_matmul import cpu, reference, triton
from pallas_kernels.lora_matmul.plan import LoraPlan
from pallas_kernels.lora_matmul.weights import LoraWeights
from pallas_kernels.selection import choose_backend

__all__ = ["Backend", "lora_matmul", "select_backend"]

Backend = Callable[[jax.Array, LoraWeights, jax.Array, LoraPlan], jax.Array]
"""Same signature as ``lora_matmul`` without ``backend``."""

_BACKENDS: dict[str, Backend] = {
    "triton": triton.lora_matmul,
    "cpu": cpu.lora_matmul,
    "reference": reference.lora_matmul,
}


def select_backend(name: str) -> tuple[str, str]:
    """Name of the backend that will serve ``name`` ("auto" or a backend's own), and why it was taken.

    Raises:
        ValueError: there is no such backend, or it cannot be used here; the message says why.
    """
    refusals = {"triton": triton.refuse, "cpu": cpu.refuse}
    return choose_backend(name, _BACKENDS, refusals, what="backend for adapters", device=jax.default_backend())


def lora_matmul(
    x: jax.Array, weights: LoraWeights, layer: jax.Array, plan: LoraPlan, *, backend: str = "reference"
) -> jax.Array:
    """x @ a[slot] @ b[slot] of each token's slot: what its adapter adds to the token's product with the base weight.

    Hu et al. 2021, "LoRA" (arXiv:2106.09685); many adapters in a batch as in Punica (arXiv:2310.18547).

    Args:
        x: [T, I] of any float dtype.
        weights: the adapters of this product. Those of slots that no token has are not looked at.
        layer: [] int32, which layer's.
        plan: which token has which slot.
        backend: who computes it (see ``select_backend``).

    Returns:
        [T, O] float32, exact zeros for tokens of slot 0 and for parts that an adapter does not change. Sums are
        float32; x @ a is rounded to x's dtype in between, but not on the CPU. A token's result does not depend on the
        other tokens' values or adapters.

    Raises:
        ValueError: shapes do not belong together.
    """
    weights.check(x)
    if plan.slots.shape != x.shape[:1]:
        raise ValueError(f"x {x.shape} and a plan of {plan.slots.shape[0]} tokens do not belong together")
    return _BACKENDS[backend](x, weights, layer, plan)
