"""Products with packed weights against numpy in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.packed_matmul import PackedWeight, pack, pack_int4, pack_int8, packed_matmul, unpack

KINDS = ("float32", "bfloat16", "float16", "int8", "int8 with offset", "int4")


def make_weight(kind: str, size_in: int, size_out: int) -> PackedWeight:
    rng = np.random.default_rng(size_in + size_out)
    if not kind.startswith("int"):
        return pack(rng.standard_normal((size_in, size_out)).astype(kind))
    groups = (size_in // 32, size_out)
    scale = (0.01 * rng.random(groups)).astype(np.float16)
    offset = (0.1 * rng.standard_normal(groups)).astype(np.float16)
    if kind == "int4":
        return pack_int4(rng.integers(0, 16, (size_in, size_out)), scale, offset)
    q = rng.integers(-127, 128, (size_in, size_out))
    return pack_int8(q, scale, offset if kind == "int8 with offset" else None)


def product(x: Any, weight: PackedWeight, backend: str, activation_bits: int = 16) -> np.ndarray:
    return np.asarray(_product(x, weight, activation_bits=activation_bits, backend=backend))


# One for all, so that instruction sets, which are chosen at run time, share compiled programs.
_product = jax.jit(packed_matmul, static_argnames=("activation_bits", "backend"))


def rounded(x: np.ndarray, limit: int) -> np.ndarray:
    """x in groups of 32, in multiples of a scale that makes the largest value ``limit``."""
    groups = x.astype(np.float64).reshape(x.shape[0], -1, 32)
    scale = np.abs(groups).max(axis=2, keepdims=True) / limit
    return (np.round(groups / np.where(scale > 0, scale, 1)) * scale).reshape(x.shape)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size_in", "size_out"), [(64, 16), (576, 50), (1056, 7), (32, 272)])
def test_equals_the_product_in_float64(backend: str, kind: str, size_in: int, size_out: int) -> None:
    weight = make_weight(kind, size_in, size_out)
    exact = np.asarray(unpack(weight)).astype(np.float64)
    rng = np.random.default_rng(0)
    for rows in (1, 2, 3, 5, 8, 13, 200):  # every height of a tile, and more rows than an item holds
        x = rng.standard_normal((rows, size_in)).astype(np.float32)
        scale = np.abs(x).astype(np.float64) @ np.abs(exact)
        assert (np.abs(product(x, weight, backend) - x @ exact) <= 2e-6 * scale).all()


@pytest.mark.parametrize("kind", ["int8", "int8 with offset", "int4", "float32"])
@pytest.mark.parametrize(("size_in", "size_out"), [(64, 16), (1056, 50)])
def test_activations_of_8_bits_are_rounded_in_groups(backend: str, kind: str, size_in: int, size_out: int) -> None:
    weight = make_weight(kind, size_in, size_out)
    exact = np.asarray(unpack(weight)).astype(np.float64)
    rng = np.random.default_rng(1)
    for rows in (1, 2, 7, 100):
        x = rng.standard_normal((rows, size_in)).astype(np.float32)
        x[0, :32] = 0
        meant = x if kind == "float32" else rounded(x, 127)
        scale = np.abs(x).astype(np.float64) @ np.abs(exact)
        # A value half-way between two integers may go either way: one step of one value in some thousand.
        wrong = np.abs(product(x, weight, backend, 8) - meant @ exact) > 2e-6 * scale
        assert wrong.mean() < 0.02


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_the_largest_integers_do_not_overflow(backend: str, kind: str) -> None:
    scale, offset = np.full((2, 16), 0.5, np.float16), np.zeros((2, 16), np.float16)
    if kind == "int4":
        weight = pack_int4(np.full((64, 16), 15), scale, offset)
    else:
        weight = pack_int8(np.full((64, 16), -128), scale)
    most = 15 if kind == "int4" else -128
    for rows in (1, 9):
        for bits in (8, 16):
            for sign in (1, -1):
                out = product(np.full((rows, 64), sign * 3.0, np.float32), weight, backend, bits)
                np.testing.assert_allclose(out, np.full((rows, 16), sign * 64 * 3.0 * 0.5 * most), rtol=1e-6)


def test_depths_that_are_no_multiple_of_anything(backend: str) -> None:
    weight = make_weight("float32", 301, 33)
    x = np.random.default_rng(0).standard_normal((7, 301)).astype(np.float32)
    np.testing.assert_allclose(product(x, weight, backend), x @ np.asarray(unpack(weight)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_rows_are_multiplied_in_float32(backend: str, dtype: str) -> None:
    weight = make_weight("float32", 576, 48)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((9, 576)), dtype)
    exact = np.asarray(x).astype(np.float64) @ np.asarray(unpack(weight)).astype(np.float64)
    np.testing.assert_allclose(product(x, weight, backend), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("backend", ["cpu-generic", "cpu-avx2", "cpu-avx512", "cpu-neon"], indirect=True)
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("kind", ["float32", "int8", "int4"])
def test_a_row_does_not_depend_on_the_rows_beside_it(backend: str, kind: str, bits: int) -> None:
    weight = make_weight(kind, 576, 160)
    x = np.random.default_rng(0).standard_normal((200, 576)).astype(np.float32)
    together = product(x, weight, backend, bits)
    for rows in (1, 2, 4, 7, 64):
        assert np.array_equal(product(x[:rows], weight, backend, bits), together[:rows])


def test_a_row_of_nan_spoils_no_other(backend: str) -> None:
    weight = make_weight("int8", 64, 20)
    x = np.ones((8, 64), np.float32)
    x[3] = np.nan
    out = product(x, weight, backend)
    assert np.isnan(out).all(axis=1).tolist() == [row == 3 for row in range(8)]
    assert np.isfinite(np.delete(out, 3, axis=0)).all()


@pytest.mark.parametrize("backend", ["cpu-generic"], indirect=True)
def test_shapes_that_do_not_fit_are_refused(backend: str) -> None:
    with pytest.raises(Exception, match="matmul: shapes do not fit"):
        product(np.ones((2, 96), np.float32), make_weight("float32", 64, 16), backend)
