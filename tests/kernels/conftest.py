"""Backends to run the shared cases with: the reference, and the native kernels of every instruction set of this CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pallas_kernels import native

_SETS = ("generic", "avx2", "avx512", "neon")


@pytest.fixture(params=["reference", *(f"cpu-{isa}" for isa in _SETS)])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Name of a backend."""
    name, _, isa = request.param.partition("-")
    if not isa:
        yield name
        return
    reason = native.missing()
    if reason is not None:
        pytest.skip(reason)
    try:
        native.use_kernels(isa)
    except ValueError as error:
        pytest.skip(str(error))
    yield name
    native.use_kernels("auto")
