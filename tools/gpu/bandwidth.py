"""What the device's memory does at best: the rate that every other section's bytes are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from gpu.results import Result
from gpu.session import Session
from gpu.timing import measure

__all__ = ["copy_bandwidth"]

_CALLS = 10


def copy_bandwidth(session: Session) -> Iterator[Result]:
    """Chained copies of an array far larger than any cache; bytes read and bytes written both count."""
    x = jnp.ones(1 << (20 if session.dry else 30), jnp.float32)
    sheet = session.chip.bandwidth
    best = 0.0
    for what, run in (("kernel", _in_kernels(x)), ("driver's copy", _by_driver(x))):
        seconds, spread = measure(run, calls=_CALLS)
        rate = 2 * x.nbytes / seconds
        best = max(best, rate)
        yield Result(
            f"copy by a {what}",
            {"GB/s": rate / 1e9, "% of the data sheet": 100 * rate / sheet, "% spread": 100 * spread},
        )
    session.measured_bandwidth(best)


def _in_kernels(x: jax.Array) -> Callable[[], jax.Array]:
    @jax.jit
    def run(x: jax.Array, factor: jax.Array) -> jax.Array:
        # The factor is an argument: with a constant, XLA could do several multiplications at once.
        return jax.lax.fori_loop(0, _CALLS, lambda _, x: x * factor, x)

    return lambda: run(x, jnp.float32(-1))


def _by_driver(x: jax.Array) -> Callable[[], jax.Array]:
    copy = jax.jit(jnp.copy)

    def run() -> jax.Array:
        y = x
        for _ in range(_CALLS):
            y = copy(y)
        return y

    return run
