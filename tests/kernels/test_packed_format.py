"""Packed weights stand for the values that were packed, whatever their sizes."""

from __future__ import annotations

from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pallas_kernels.packed_matmul import (
    GROUP,
    PANEL,
    PackedWeight,
    pack,
    pack_int4,
    pack_int8,
    packed_matmul,
    select_backend,
    take_columns,
    unpack,
)

FLOATS = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
KINDS = ("float32", "float16", "bfloat16", "int8", "int8 with offset", "int4")

_unpack, _take_columns = jax.jit(unpack), jax.jit(take_columns)  # one program instead of one for each operation
# Few, as each is compiled anew.
sizes_out = st.sampled_from([1, PANEL, 3 * PANEL + 1])
seeds = st.integers(0, 2**32 - 1)


def packed(kind: str, size_in: int, size_out: int, seed: int) -> tuple[PackedWeight, NDArray[Any]]:
    """A random weight of one kind, and its values [I, O] made without the code under test."""
    rng = np.random.default_rng(seed)
    if not kind.startswith("int"):
        values = rng.standard_normal((size_in, size_out)).astype(kind)
        return pack(values), values
    scale, offset = rng.standard_normal((2, size_in // GROUP, size_out)).astype(np.float16)
    low, high = (0, 16) if kind == "int4" else (-128, 128)
    q = rng.integers(low, high, (size_in, size_out))
    values = q.astype(np.float32) * np.repeat(scale.astype(np.float32), GROUP, axis=0)
    if kind == "int8":
        return pack_int8(q, scale), values
    values += np.repeat(offset.astype(np.float32), GROUP, axis=0)
    return (pack_int4 if kind == "int4" else pack_int8)(q, scale, offset), values


def same(a: Any, b: Any) -> bool:
    """Equal in dtype and in every value."""
    return a.dtype == b.dtype and np.array_equal(np.asarray(a), np.asarray(b))


@settings(max_examples=20)
@given(st.sampled_from(FLOATS), st.sampled_from([1, 32, 67]), sizes_out, seeds)
def test_floats_come_back_as_they_were(dtype: np.dtype[Any], size_in: int, size_out: int, seed: int) -> None:
    weight, values = packed(dtype.name, size_in, size_out, seed)
    assert weight.shape == (size_in, size_out)
    assert weight.data.shape == (-(-size_out // PANEL), size_in, PANEL)
    assert same(_unpack(weight), values)


@settings(max_examples=20)
@given(st.sampled_from(KINDS[3:]), st.sampled_from([1, 3]), sizes_out, seeds)
def test_quantised_weights_are_scale_times_q_plus_offset(kind: str, groups: int, size_out: int, seed: int) -> None:
    weight, values = packed(kind, groups * GROUP, size_out, seed)
    assert weight.shape == (groups * GROUP, size_out)
    assert same(_unpack(weight), values)
    assert weight.data.nbytes == weight.data.shape[0] * PANEL * groups * GROUP // (2 if kind == "int4" else 1)


@settings(max_examples=20)
@given(st.sampled_from(KINDS), sizes_out, seeds, st.data())
def test_columns_are_those_of_the_whole(kind: str, size_out: int, seed: int, data: st.DataObject) -> None:
    weight, values = packed(kind, 2 * GROUP, size_out, seed)
    columns = np.array(data.draw(st.lists(st.integers(0, size_out - 1), min_size=4, max_size=4)), np.int32)
    assert same(_take_columns(weight, columns), values[:, columns].T)


@pytest.mark.parametrize("kind", KINDS)
def test_columns_past_the_last_are_zeros(kind: str) -> None:
    weight, _ = packed(kind, GROUP, PANEL + 3, 0)
    whole = PackedWeight(weight.data, weight.scale, weight.offset, size_out=2 * PANEL)
    assert not np.asarray(unpack(whole))[:, PANEL + 3 :].any()


def test_eight_inputs_of_four_bits_lie_in_a_word_the_first_four_low() -> None:
    q = np.zeros((GROUP, 1), np.uint8)
    q[:9, 0] = [1, 2, 3, 4, 5, 6, 7, 8, 15]
    scale = np.ones((1, 1), np.float16)
    assert np.asarray(pack_int4(q, scale, scale).data)[0, :3, 0].tolist() == [0x84736251, 0xF, 0]


def test_two_inputs_of_eight_bits_lie_together() -> None:
    q = np.zeros((GROUP, 2), np.int8)
    q[:3] = [[1, -1], [2, -2], [3, -3]]
    data = np.asarray(pack_int8(q, np.ones((1, 2), np.float16)).data)
    assert data[0, :2, :2].tolist() == [[[1, 2], [-1, -2]], [[3, 0], [-3, 0]]]


@pytest.mark.parametrize(
    ("shape", "scales"), [((32, 4), (2, 4)), ((33, 4), (1, 4)), ((32, 4), (1, 5))], ids=["groups", "ragged", "columns"]
)
def test_scales_of_another_shape_are_refused(shape: tuple[int, int], scales: tuple[int, int]) -> None:
    q, right = np.zeros(shape, np.int8), np.ones((shape[0] // GROUP, shape[1]), np.float16)
    wrong = np.ones(scales, np.float16)
    with pytest.raises(ValueError, match="scales of a weight"):
        pack_int8(q, wrong)
    with pytest.raises(ValueError, match="scales of a weight"):
        pack_int4(q, right, wrong)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_reference_multiplies_in_float32(kind: str, dtype: np.dtype[Any]) -> None:
    weight, values = packed(kind, 2 * GROUP, PANEL + 1, 1)
    x = np.random.default_rng(2).standard_normal((3, 2 * GROUP)).astype(dtype)
    out = jax.jit(packed_matmul)(x, weight)
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, x.astype(np.float64) @ values.astype(np.float64), rtol=1e-5, atol=1e-3)


def test_activations_have_8_or_16_bits() -> None:
    weight, _ = packed("int4", GROUP, PANEL, 0)
    with pytest.raises(ValueError, match="activation_bits is 8 or 16, not 4"):
        packed_matmul(np.ones((1, GROUP), np.float32), weight, activation_bits=4)


def test_unknown_backends_are_refused_with_the_known_ones() -> None:
    assert select_backend("reference") == ("reference", "asked for")
    assert select_backend(select_backend("auto")[0])[0] == select_backend("auto")[0]
    with pytest.raises(ValueError, match="'fast'; there are: auto, triton, cpu, reference"):
        select_backend("fast")
