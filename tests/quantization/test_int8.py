"""Int8 on load: how far values may be off, and what cannot be quantised."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from jaxserve.errors import LoadError
from jaxserve.quantization import quantize_int8

FINITE = st.floats(-(2**22), 2**22, width=32)


@given(arrays.arrays(np.float32, (64, 3), elements=FINITE))
def test_no_value_is_off_by_more_than_half_a_scale(weight: np.ndarray) -> None:
    blocks = quantize_int8(weight, "w")
    assert blocks.offset is None
    assert (blocks.q.dtype, blocks.scale.dtype, blocks.scale.shape) == (np.int8, np.float16, (2, 3))
    assert np.abs(blocks.q.astype(int)).max() <= 127
    scale = np.repeat(blocks.scale.astype(np.float64), 32, axis=0)
    smallest = np.finfo(np.float32).tiny  # subnormal values may become zeros, as they do in products
    assert np.all(np.abs(blocks.q * scale - weight) <= scale * (0.5 + 1e-6) + smallest)
    # The scale is the least that will do, but for its rounding.
    largest = np.abs(weight).reshape(2, 32, 3).max(axis=1)
    assert np.all(blocks.scale <= largest / 127 * (1 + 2**-10) + 2**-24)


def test_zeros_stay_zeros() -> None:
    weight = np.ones((64, 2), np.float32)
    weight[:32, 1] = 0
    blocks = quantize_int8(weight, "w")
    assert not blocks.q[:32, 1].any()
    assert blocks.scale[0, 1] == 0
    assert blocks.q[32:].min() == blocks.q[:, 0].max() == 127


@pytest.mark.parametrize("value", [127 * 65600.0, np.inf, np.nan])
def test_a_scale_beyond_float16_is_refused_with_the_tensor(value: float) -> None:
    weight = np.ones((32, 2), np.float32)
    weight[5, 1] = value
    with pytest.raises(LoadError, match=r"blk\.0\.ffn_up\.weight.*--quantization none"):
        quantize_int8(weight, "blk.0.ffn_up.weight")
