"""Lists of work in fixed shapes: rows (or slots) have numbers of things, and each thing learns whose it is."""

from __future__ import annotations

import jax
import jax.numpy as jnp

__all__ = ["items", "owner"]


def items(counts: jax.Array, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """List counts [R] of things by row: the row of each [size], its index within the row [size], how many there are.

    Behind the last thing a list means nothing. All are int32.
    """
    ends = jnp.cumsum(counts)
    item = jnp.arange(size)
    row = owner(ends, item)
    return row, (item - (ends[row] - counts[row])).astype(jnp.int32), ends[-1].astype(jnp.int32)


def owner(ends: jax.Array, item: jax.Array) -> jax.Array:
    """Row of each item, when row r's items are those from ends[r - 1] to ends[r] - 1; the last row's behind them."""
    # compare_all: the default method becomes a loop on the device.
    row = jnp.searchsorted(ends, item, side="right", method="compare_all").astype(jnp.int32)
    return jnp.minimum(row, ends.shape[0] - 1)
