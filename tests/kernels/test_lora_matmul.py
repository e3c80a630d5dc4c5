"""What adapters add to a product: every backend against numpy in float64; Triton's is interpreted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pallas_kernels import native, tuning
from pallas_kernels.lora_matmul import (
    LoraPlan,
    LoraWeights,
    cpu,
    lora_matmul,
    make_plan,
    reference,
    select_backend,
    triton,
)
from pallas_kernels.lora_matmul.plan import TILE
from pallas_kernels.lora_matmul.triton import Sizes
from tests.kernels.gpus import TRITON_CALL, pretended_gpu

SMALL = Sizes(inputs=64, columns=32, num_warps=4, num_stages=2)
BACKENDS: dict[str, Callable[..., jax.Array]] = {
    "reference": reference.lora_matmul,
    "triton": partial(triton.lora_matmul, sizes=SMALL, interpret=True),
}
if native.missing() is None:
    BACKENDS["cpu"] = cpu.lora_matmul
LAYER, LAYERS, SLOTS = 1, 3, 4
# Relative to the sum of absolute products: x @ a is rounded to x's dtype, and so are the factors, which are made in it.
TOLERANCE = {"float32": 3e-6, "bfloat16": 2.0**-8, "float16": 2.0**-11}

Array = NDArray[Any]


class Case:
    """Random adapters in a bank whose slot 2, which nobody has, and whose other layers are poisoned.

    A product has three parts; the adapter of slot 3 has half the rank and does not change the second part.
    """

    def __init__(
        self, tokens: int, size_in: int, rank: int, size_out: int, dtype: str = "float32", slots: Array | None = None
    ) -> None:
        rng = np.random.default_rng(tokens + rank)
        kind = jnp.dtype(dtype)
        self.parts = (size_out, 5, 17)
        self.x = rng.standard_normal((tokens, size_in)).astype(kind)
        self.a = rng.standard_normal((SLOTS, LAYERS, 3 * rank, size_in)).astype(kind)
        self.b = rng.standard_normal((SLOTS, LAYERS, rank, sum(self.parts))).astype(kind)
        self.ranks = np.full((SLOTS, LAYERS, 3), rank, np.int32)
        self.ranks[2] = rank // 2, 0, rank // 2
        by_part = self.a.reshape(SLOTS, LAYERS, 3, rank, size_in)
        by_part[2, :, :, rank // 2 :] = by_part[2, :, 1] = 0
        self.b[2, :, rank // 2 :] = self.b[2, :, :, size_out : size_out + 5] = 0
        for array in (self.a, self.b):
            array[1] = array[:, [0, 2]] = np.nan
        self.slots = rng.choice([0, 1, 3, 4], tokens, p=[0.3, 0.5, 0.15, 0.05]) if slots is None else slots

    @property
    def weights(self) -> LoraWeights:
        return LoraWeights(jnp.asarray(self.a), jnp.asarray(self.b), jnp.asarray(self.ranks), self.parts)

    def run(self, backend: str, chosen: Any = slice(None)) -> Array:
        return np.asarray(_run(backend, self.x[chosen], self.weights, self.slots[chosen].astype(np.int32)))

    def check(self, out: Array) -> None:
        assert out.dtype == np.float32
        assert out.shape == (len(self.x), sum(self.parts))
        x, b = self.x.astype(np.float64), self.b[:, LAYER].astype(np.float64)
        a = self.a[:, LAYER].reshape(SLOTS, 3, -1, self.x.shape[1]).swapaxes(2, 3).astype(np.float64)
        ends = np.cumsum(self.parts)
        for token, slot in enumerate(self.slots):
            if slot == 0:
                assert not out[token].any()
                continue
            for part, end in enumerate(ends):
                columns = slice(end - self.parts[part], end)
                first, second = a[slot - 1, part], b[slot - 1][:, columns]
                scale = np.abs(x[token]) @ np.abs(first) @ np.abs(second)
                wrong = np.abs(out[token, columns] - x[token] @ first @ second)
                assert (wrong <= TOLERANCE[self.x.dtype.name] * scale).all()


# Most of a test's time goes to compiling, which takes half of it when nothing is optimised.
@partial(jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})
def _run(backend: str, x: jax.Array, weights: LoraWeights, slots: jax.Array) -> jax.Array:
    return BACKENDS[backend](x, weights, jnp.int32(LAYER), make_plan(slots, SLOTS + 1))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tokens", [3, 65])
def test_equals_the_products_in_float64(backend: str, dtype: str, tokens: int) -> None:
    case = Case(tokens, 100, 8, 33, dtype)
    case.check(case.run(backend))


@pytest.mark.parametrize(
    ("tokens", "size_in", "rank", "size_out"), [(96, 64, 16, 32), (130, 576, 24, 50), (200, 1200, 64, 64)]
)
def test_sizes_need_not_fit(tokens: int, size_in: int, rank: int, size_out: int) -> None:
    case = Case(tokens, size_in, rank, size_out, "bfloat16")
    case.check(case.run("triton"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("slot", [0, 1, 4])
def test_a_step_of_one_slot(backend: str, slot: int) -> None:
    case = Case(80, 64, 256, 40, slots=np.full(80, slot))
    case.check(case.run(backend))


@pytest.mark.parametrize("backend", BACKENDS.keys() - {"reference"})
def test_ranks_that_an_adapter_does_not_use_are_not_read(backend: str) -> None:
    case = Case(80, 100, 32, 33)
    good = case.run(backend)
    by_part = case.a.reshape(SLOTS, LAYERS, 3, 32, 100)
    by_part[2, :, :, 16:] = by_part[2, :, 1] = np.nan
    case.b[2, :, 16:] = case.b[2, :, :, 33:38] = np.nan
    assert np.array_equal(case.run(backend), good)


def test_a_token_has_the_same_bits_in_any_step() -> None:
    case = Case(200, 2200, 16, 40)
    for backend in BACKENDS.keys() - {"reference"}:
        together = case.run(backend)
        for chosen in (slice(50, 116), np.flatnonzero(case.slots != 1)[:66]):
            assert np.array_equal(case.run(backend, chosen), together[chosen])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [20, 100])
def test_a_token_of_nan_spoils_no_other(backend: str, tokens: int) -> None:
    case = Case(tokens, 96, 8, 40)
    case.slots[[3, 11, 4]] = 1, 4, 0
    good = case.run(backend)
    case.x[3], case.x[11, 5], case.x[4] = np.nan, np.inf, np.nan
    out = case.run(backend)
    assert not np.isfinite(out[[3, 11]]).any()
    assert not out[4].any()
    assert np.array_equal(np.delete(out, [3, 11], axis=0), np.delete(good, [3, 11], axis=0))


@settings(max_examples=30)
@given(st.lists(st.integers(0, 6), min_size=150, max_size=150), st.integers(0, 150))
def test_tiles_hold_every_token_once(drawn: list[int], same: int) -> None:
    slots = np.array([*drawn[same:], *[drawn[0]] * same], np.int32)  # often with a long run
    plan: LoraPlan = jax.tree.map(np.asarray, _plan(slots))
    count = int(plan.num_tiles)
    assert count <= plan.tile_slot.shape[0]
    seen = []
    for slot, start, end in zip(plan.tile_slot[:count], plan.tile_start[:count], plan.tile_end[:count], strict=True):
        assert 0 < end - start <= TILE
        tokens = plan.order[start:end]
        assert (slots[tokens] == slot).all()
        seen += tokens.tolist()
    assert seen == np.argsort(slots, kind="stable").tolist()


_plan = jax.jit(partial(make_plan, num_slots=7))


def test_the_public_function_is_the_backends() -> None:
    case = Case(70, 64, 8, 32)
    plan = make_plan(jnp.asarray(case.slots), SLOTS + 1)
    case.check(np.asarray(jax.jit(lora_matmul)(case.x, case.weights, jnp.int32(LAYER), plan)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_instruction_set_multiplies_alike(backend: str, dtype: str) -> None:
    case = Case(11, 70, 6, 45, dtype)
    case.check(case.run(backend))


def test_what_does_not_belong_together_is_refused() -> None:
    case = Case(70, 64, 8, 32)
    plan, weights = make_plan(jnp.asarray(case.slots), SLOTS + 1), case.weights
    for x, other in (
        (case.x[1:], weights),
        (case.x[:, 1:], weights),
        (case.x, replace(weights, a=weights.a[1:])),
        (case.x, replace(weights, b=weights.b[:, :, 1:])),
        (case.x, replace(weights, ranks=weights.ranks[:, 1:])),
        (case.x, replace(weights, parts=(54,))),
    ):
        with pytest.raises(ValueError, match="do not belong together"):
            lora_matmul(x, other, jnp.int32(0), plan)


SHAPES = {
    "rank 16": (2048, 4096, 16, 4096, "bfloat16"),
    "rank 8": (300, 576, 8, 1000, "float16"),
    "rank 256": (512, 4096, 256, 14336, "bfloat16"),
    "float32": (128, 576, 64, 1536, "float32"),
}


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("case", SHAPES.values(), ids=SHAPES.keys())
def test_lowers_for_nvidia_gpus(case: tuple[int, int, int, int, str]) -> None:
    tokens, size_in, rank, size_out, dtype = case

    @jax.jit
    def step(x: jax.Array, a: jax.Array, b: jax.Array, ranks: jax.Array, slots: jax.Array) -> jax.Array:
        weights = LoraWeights(a, b, ranks, (size_out // 2, size_out - size_out // 2))
        return lora_matmul(x, weights, jnp.int32(1), make_plan(slots, 8), backend="triton")

    shapes = ((tokens, size_in), (7, 2, 2 * rank, size_in), (7, 2, rank, size_out))
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    args.append(jax.ShapeDtypeStruct((7, 2, 2), jnp.int32))
    with pretended_gpu():
        lowered = step.trace(*args, jax.ShapeDtypeStruct((tokens,), jnp.int32)).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count(TRITON_CALL) == 2


def test_backends_are_chosen_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "target", lambda: None)
    monkeypatch.setattr(native, "missing", lambda: "it was not built")
    assert select_backend("auto") == (
        "reference",
        "not triton: it runs on NVIDIA GPUs only; not cpu: it was not built",
    )
    monkeypatch.setattr(native, "missing", lambda: None)
    assert select_backend("auto")[0] == "cpu"
    with pytest.raises(ValueError, match="the backend for adapters 'triton' cannot be used"):
        select_backend("triton")
    monkeypatch.setattr(tuning, "target", lambda: tuning.Target("NVIDIA Old", 75))
    assert select_backend("auto")[1].endswith("not triton: it needs compute capability 8.0, and NVIDIA Old has 7.5")
    monkeypatch.setattr(tuning, "target", lambda: tuning.Target("NVIDIA L4", 89))
    assert select_backend("auto")[0] == "triton"


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 120])
def test_every_chip_has_sizes_for_every_rank(monkeypatch: pytest.MonkeyPatch, capability: int) -> None:
    monkeypatch.setattr(tuning, "target", lambda: tuning.Target("NVIDIA Unheard Of", capability))
    for rank in (1, 8, 16, 48, 128, 256, 512):
        for dtype in ("float32", "bfloat16", "float16"):
            sizes = triton.default_sizes(rank, dtype)
            assert all(size & (size - 1) == 0 and size >= 16 for size in (sizes.inputs, sizes.columns))
