"""One thing to compile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from cuda_aot.targets import Target

__all__ = ["Case", "Make", "array"]


@dataclass(frozen=True, slots=True)
class Case:
    """A function, abstract arguments, and what is expected of the compiled program.

    Attributes:
        function: to be jitted.
        args: trees of arrays or ``jax.ShapeDtypeStruct``.
        donate: numbers of the arguments that are updated in place.
        pool: shape of a KV pool as HLO writes it, of which there must be no copy.
        expected: what the program is judged by, see ``reports.Report``.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    donate: tuple[int, ...] = ()
    pool: str | None = None
    expected: dict[str, int] | None = None


Make = Callable[[Target], Case | None]
"""Makes a case for a chip; None if it does not exist there."""


def array(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    """An abstract array."""
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
