"""Normalisation against numpy in float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rms_norm import rms_norm

EPS = 1e-5


def normalised(x: Any, weight: Any, backend: str) -> np.ndarray:
    return np.asarray(_normalise(x, weight, backend=backend))


_normalise = jax.jit(partial(rms_norm, eps=EPS), static_argnames="backend")


def expected(x: Any, weight: Any) -> np.ndarray:
    wide = np.asarray(x).astype(np.float64)
    scale = 1 / np.sqrt((wide * wide).mean(-1, keepdims=True) + EPS)
    return wide * scale * np.asarray(weight).astype(np.float64)


@pytest.mark.parametrize("shape", [(1, 576), (70, 64), (5, 3, 80), (2, 37)])
def test_equals_the_definition(backend: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal(shape).astype(np.float32), rng.standard_normal(shape[-1]).astype(np.float32)
    np.testing.assert_allclose(normalised(x, weight, backend), expected(x, weight), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_types_round_as_the_reference_does(backend: str, dtype: str) -> None:
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((9, 576), (576,)))
    out = normalised(x, weight, backend)
    assert out.dtype == dtype
    same = out == normalised(x, weight, "reference")
    assert same.mean() > 0.99  # a scale that differs in its last bit may tip a rounding
    np.testing.assert_allclose(out.astype(np.float64), expected(x, weight), rtol=2e-2, atol=1e-2)


def test_rows_of_zeros_stay_zeros(backend: str) -> None:
    assert not normalised(np.zeros((2, 64), np.float32), np.ones(64, np.float32), backend).any()


@pytest.mark.parametrize("backend", ["cpu-generic", "cpu-avx2", "cpu-avx512", "cpu-neon"], indirect=True)
def test_a_row_does_not_depend_on_the_rows_beside_it(backend: str) -> None:
    x = np.random.default_rng(0).standard_normal((300, 576)).astype(np.float32)
    weight = np.ones(576, np.float32)
    together = normalised(x, weight, backend)
    for rows in (1, 2, 64):
        assert np.array_equal(normalised(x[:rows], weight, backend), together[:rows])
