"""The one public function, and the choice of who computes it."""

from __future__ import annotations

from collections.abc import Callable

import jax

from pallas_kernels.lora_matmul import reference, triton
from pallas_kernels.lora_matmul.plan import LoraPlan
from pallas_kernels.selection import choose_backend

__all__ = ["Backend", "lora_matmul", "select_backend"]

Backend = Callable[[jax.Array, jax.Array, jax.Array, LoraPlan], jax.Array]
"""Same signature as ``lora_matmul`` without ``backend``."""

_BACKENDS: dict[str, Backend] = {"triton": triton.lora_matmul, "reference": reference.lora_matmul}


def select_backend(name: str) -> tuple[str, str]:
    """Name of the backend that will serve ``name`` ("auto" or a backend's own), and why it was taken.

    Raises:
        ValueError: there is no such backend, or it cannot be used here; the message says why.
    """
    refusals = {"triton": triton.refuse}
    return choose_backend(name, _BACKENDS, refusals, what="backend for adapters", device=jax.default_backend())


def lora_matmul(x: jax.Array, a: jax.Array, b: jax.Array, plan: LoraPlan, *, backend: str = "reference") -> jax.Array:
    """x @ a[slot] @ b[slot] of each token's slot: what its adapter adds to the token's product with the base weight.

    Hu et al. 2021, "LoRA" (arXiv:2106.09685); many adapters in a batch as in Punica (arXiv:2310.18547).

    Args:
        x: [T, I] of any float dtype.
        a: [n, I, r] the first factors of all adapters.
        b: [n, r, O] the second ones, scales (alpha / r) included; an adapter of a smaller rank has zeros in the rest.
            Matrices of slots that no token has are not looked at, nor are those of slot 0.
        plan: which token has which slot.
        backend: who computes it (see ``select_backend``).

    Returns:
        [T, O] float32, exact zeros for tokens of slot 0. Sums are float32; x @ a is rounded to x's dtype in between.
        A token's result does not depend on the other tokens' values or adapters.

    Raises:
        ValueError: shapes do not belong together.
    """
    if a.shape[:2] != (b.shape[0], x.shape[1]) or a.shape[2] != b.shape[1] or plan.slots.shape != x.shape[:1]:
        raise ValueError(
            f"x {x.shape}, a {a.shape}, b {b.shape} and a plan of {plan.slots.shape[0]} tokens do not belong together"
        )
    return _BACKENDS[backend](x, a, b, plan)
