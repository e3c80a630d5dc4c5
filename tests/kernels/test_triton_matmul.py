"""The Triton backend of packed weights, interpreted on the CPU, and lowered for GPUs.

Interpreted outputs start as NaN, so what a kernel forgets to write shows.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from pallas_kernels import tuning
from pallas_kernels.packed_matmul import PackedWeight, pack, pack_int4, packed_matmul, select_backend, triton, unpack
from pallas_kernels.packed_matmul.triton import Sizes
from tests.kernels.gpus import TRITON_CALL, pretended_gpu
from tests.kernels.test_packed_format import packed

SMALL = Sizes(columns=32, tokens=64, groups=4, splits=3, num_warps=4, num_stages=2)
KINDS = ("int4", "int8", "int8 with offset")
# Of the sum of absolute products: a weight is rounded to x's dtype.
TOLERANCE = {"float32": 2e-6, "bfloat16": 2.0**-9, "float16": 2.0**-12 + 2e-6}


# Most of a test's time goes to compiling, which takes half of it when nothing is optimised.
@partial(jax.jit, static_argnames="sizes", compiler_options={"xla_backend_optimization_level": 0})
def product(x: jax.Array, weight: PackedWeight, sizes: Sizes = SMALL) -> jax.Array:
    return triton.packed_matmul(x, weight, sizes=sizes, interpret=True)


def rows(tokens: int, size_in: int, dtype: str = "float32") -> NDArray[Any]:
    return np.random.default_rng(tokens).standard_normal((tokens, size_in)).astype(jnp.dtype(dtype))


def check(x: NDArray[Any], values: NDArray[Any], out: Any) -> None:
    """Against numpy in float64."""
    exact, x64 = values.astype(np.float64), x.astype(np.float64)
    assert out.dtype == np.float32
    assert out.shape == (x.shape[0], values.shape[1])
    assert (np.abs(out - x64 @ exact) <= TOLERANCE[x.dtype.name] * (np.abs(x64) @ np.abs(exact))).all()


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*(("int4", dtype) for dtype in TOLERANCE), ("int8", "float16"), ("int8 with offset", "bfloat16")],
)
def test_equals_the_product_in_float64(kind: str, dtype: str) -> None:
    x, (weight, values) = rows(17, 576, dtype), packed(kind, 576, 50, 0)
    check(x, values, product(x, weight))


@pytest.mark.parametrize(
    ("kind", "tokens", "size_in", "size_out"),
    [
        ("int4", 1, 32, 1),
        ("int8", 70, 160, 33),
        ("int8", 3, 256, 64),
        ("int8 with offset", 5, 2208, 16),
    ],
)
def test_sizes_need_not_fit(kind: str, tokens: int, size_in: int, size_out: int) -> None:
    x, (weight, values) = rows(tokens, size_in, "bfloat16"), packed(kind, size_in, size_out, 0)
    check(x, values, product(x, weight))


@pytest.mark.parametrize(("kind", "tokens"), [("int4", 9), ("int8", 300)])
def test_equals_the_reference_with_the_tuned_sizes(kind: str, tokens: int) -> None:
    x, (weight, _) = rows(tokens, 2080), packed(kind, 2080, 200, 0)
    out = product(x, weight, triton.default_sizes(tokens, kind, "float32"))
    expected = jax.jit(packed_matmul)(x, weight)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_is_scale_times_q_plus_offset(kind: str) -> None:
    """One input of a token is 1, the others 0: each result is one weight."""
    weight, values = packed(kind, 96, 16, 0)
    # Fractions of a whole range of integers are added up, in float32.
    most = np.abs(np.asarray(weight.scale, np.float32)).max() * (16 if kind == "int4" else 384)
    np.testing.assert_allclose(product(np.eye(96, dtype=np.float32), weight), values, rtol=0, atol=most * 2.0**-23)


@pytest.mark.parametrize(("kind", "dtype"), [("int4", "bfloat16"), ("int8", "float32")])
def test_a_row_has_the_same_bits_alone_and_in_any_step(kind: str, dtype: str) -> None:
    x, weight = rows(64, 2208, dtype), packed(kind, 2208, 40, 0)[0]
    together = np.asarray(product(x, weight))
    for chosen in (slice(5, 6), slice(7, 30)):  # in tiles of 16 and 32 tokens
        assert np.array_equal(product(x[chosen], weight), together[chosen])


def test_a_row_of_nan_spoils_no_other() -> None:
    x, weight = rows(20, 96), packed("int4", 96, 20, 0)[0]
    good = np.asarray(product(x, weight))
    x[3], x[11, 5] = np.nan, np.inf
    out = np.asarray(product(x, weight))
    bad = [3, 11]
    assert not np.isfinite(out[bad]).any()
    assert np.array_equal(np.delete(out, bad, axis=0), np.delete(good, bad, axis=0))


def test_columns_past_the_last_may_hold_anything() -> None:
    x, weight = rows(20, 96), packed("int4", 96, 20, 0)[0]
    good = np.asarray(product(x, weight))
    scale = np.array(weight.scale)
    scale[1, :, 4:] = np.nan
    assert np.array_equal(product(x, weight.replace(scale=scale)), good)


@pytest.mark.parametrize("group", [64, 128])
def test_larger_groups_with_zeros_are_served(group: int) -> None:
    """GPTQ and AWQ: scale * (q - zero)."""
    rng = np.random.default_rng(group)
    q, zero = rng.integers(0, 16, (256, 24)), rng.integers(0, 16, (256 // group, 24))
    scale = (0.01 * rng.random(zero.shape)).astype(np.float16)
    weight = pack_int4(q, scale, -(scale.astype(np.float32) * zero), group=group)
    exact = np.repeat(scale.astype(np.float64), group, 0) * (q - np.repeat(zero, group, 0))
    # Offsets are rounded to float16.
    assert (np.abs(unpack(weight) - exact) <= 2.0**-11 * 15 * np.repeat(scale.astype(np.float64), group, 0)).all()


def test_groups_of_other_sizes_are_refused() -> None:
    scale = np.ones((2, 4), np.float16)
    with pytest.raises(ValueError, match="inputs that share a scale are a multiple of 32, not 48"):
        pack_int4(np.zeros((96, 4), np.uint8), scale, scale, group=48)


SHAPES = {
    "decode": (1, 4096, 4096, "int4", "bfloat16"),
    "full step": (64, 4096, 4096, "int4", "float16"),
    "mixed": (200, 14336, 4096, "int4", "bfloat16"),
    "prefill": (2048, 576, 49152, "int4", "bfloat16"),
    "float32": (16, 576, 1536, "int4", "float32"),
    "prefill of float32": (512, 576, 1000, "int8", "float32"),
    "int8": (16, 4096, 4096, "int8", "bfloat16"),
    "int8 with offset": (2048, 4096, 4096, "int8 with offset", "float16"),
}


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("case", SHAPES.values(), ids=SHAPES.keys())
def test_lowers_for_nvidia_gpus(case: tuple[int, int, int, str, str]) -> None:
    tokens, size_in, size_out, kind, dtype = case
    panels, word = -(-size_out // 16), {"int4": ((size_in // 8, 16), jnp.uint32)}
    shape, integer = word.get(kind, ((size_in // 2, 16, 2), jnp.int8))
    scale = jax.ShapeDtypeStruct((panels, size_in // 32, 16), jnp.float16)
    weight = PackedWeight(
        jax.ShapeDtypeStruct((panels, *shape), integer), scale, None if kind == "int8" else scale, size_out=size_out
    )
    x = jax.ShapeDtypeStruct((tokens, size_in), dtype)
    with pretended_gpu():
        step = jax.jit(partial(packed_matmul, backend="triton"))
        text = step.trace(x, weight).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count(TRITON_CALL) == 1


@pytest.mark.parametrize(
    ("kind", "bits", "capability", "reason"),
    [
        ("int4", 16, 75, "it needs compute capability 8.0, and a GPU has 7.5"),
        ("bfloat16", 16, 90, "quantised weights only, not bfloat16"),
        ("int8", 8, 90, "does not round them to 8 bits"),
    ],
)
def test_refuses_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, kind: str, bits: int, capability: int, reason: str
) -> None:
    monkeypatch.setattr(tuning, "target", lambda: tuning.Target("a GPU", capability))
    with pytest.raises(ValueError, match=reason):
        select_backend("triton", kind=kind, activation_bits=bits)
    name, why = select_backend("auto", kind=kind, activation_bits=bits)
    assert name == "cpu" or why.startswith("not triton: ")


def test_refuses_on_other_devices() -> None:
    if jax.default_backend() == "cpu":
        with pytest.raises(ValueError, match="cannot be used: it runs on NVIDIA GPUs only"):
            select_backend("triton")


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_is_the_choice_on_gpus(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(tuning, "target", lambda: tuning.Target("NVIDIA L4", 89))
    assert select_backend("auto", kind=kind)[0] == "triton"


def test_refuses_what_it_was_not_chosen_for() -> None:
    x = np.ones((2, 32), np.float32)
    with pytest.raises(ValueError, match=r"cannot serve this: .* not float32"):
        triton.packed_matmul(x, pack(np.ones((32, 16), np.float32)))
    with pytest.raises(ValueError, match=r"cannot serve this: .* 8 bits"):
        triton.packed_matmul(x, packed("int4", 32, 16, 0)[0], 8)


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 120])
def test_every_chip_has_sizes_for_every_shape(monkeypatch: pytest.MonkeyPatch, capability: int) -> None:
    monkeypatch.setattr(tuning, "target", lambda: tuning.Target("NVIDIA Unheard Of", capability))
    for tokens in (1, 64, 65, 256, 257, 8192):
        for kind in ("int4", "int8"):
            for dtype in ("float32", "bfloat16", "float16"):
                sizes = triton.default_sizes(tokens, kind, dtype)
                assert all(size & (size - 1) == 0 for size in sizes[:3])
                # A matrix tile has 16 inputs at least, and a word gives it one.
                assert sizes.groups * 32 // (8 if kind == "int4" else 2) >= 16
                assert min(sizes.columns, sizes.tokens) >= 16
