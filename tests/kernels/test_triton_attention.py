"""The Triton backend of paged attention, interpreted on the CPU, and lowered for GPUs.

Interpreted outputs start as NaN, so what a kernel forgets to write shows. Tiles are small: most of a test's time goes
to compiling interpreted loops.
"""

from __future__ import annotations

import random
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pallas_kernels import tuning
from pallas_kernels.paged_attention import make_plan, select_backend, triton
from pallas_kernels.paged_attention.triton import Sizes
from tests.kernels.cases import AttentionCase, attend
from tests.kernels.gpus import TRITON_CALL, pretended_gpu

interpreted = partial(triton.paged_attention, decode=Sizes(16, 32, 4, 2), prefill=Sizes(32, 32, 4, 2), interpret=True)
run = partial(attend, backend=interpreted, optimised=False)

# Absolute; the pools' own rounding is part of the answer, so this is what products and sums may lose.
TOLERANCE = {"float32": 5e-6, "bfloat16": 1.5e-2, "float16": 2e-3}

PROPERTIES = {
    "dtype": ("float32", "bfloat16", "float16"),
    "head_dim": (64, 80, 96, 128, 256),
    "block_size": (8, 16, 24, 64),
    "group": (1, 3, 4, 8),
    "kv_heads": (1, 2),
    "window": (None, 1, 37),
    "soft_cap": (None, 5.0),
    "decode_queries": (1, 4),
}
ROWS = ((1, 9), (1, 600), (3, 257), (4, 4), (20, 41), (70, 90))


def grid(size: int) -> list[dict[str, object]]:
    """Cases in which each value of each property turns up equally often, in ever other company."""
    rng = random.Random(1)
    columns = {}
    for name, values in PROPERTIES.items():
        column = [values[i % len(values)] for i in range(size)]
        rng.shuffle(column)
        columns[name] = column
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def check(case: AttentionCase, atol: float | None = None, **options: bool) -> None:
    np.testing.assert_allclose(run(case, **options), case.expected(), atol=atol or TOLERANCE[case.dtype], rtol=0)


# The first six have every value, too.
@pytest.mark.parametrize("properties", grid(8)[:6], ids=lambda p: "-".join(str(value) for value in p.values()))
def test_equals_the_dense_answer(properties: dict[str, object]) -> None:
    own = {name: value for name, value in properties.items() if name != "group"}
    check(AttentionCase(ROWS, heads=properties["group"] * properties["kv_heads"], **own))


OTHERS = {
    "prompt": AttentionCase(((150, 150),)),
    "more queries than a tile holds": AttentionCase(((5, 50), (40, 300)), heads=6, kv_heads=2, decode_queries=40),
    "more heads in a group than rows in a tile": AttentionCase(((1, 50), (9, 12)), heads=40, kv_heads=1, head_dim=32),
    "tree": AttentionCase(((1, 20), (5, 600), (8, 8), (3, 131), (20, 90)), decode_queries=8, tree=True),
    "tree of two words in a window": AttentionCase(
        ((40, 300), (1, 7), (33, 40)), heads=6, kv_heads=2, decode_queries=40, tree=True, window=9
    ),
    "int8": AttentionCase(ROWS, decode_queries=4, pool_dtype="int8"),
    "e4m3": AttentionCase(ROWS, pool_dtype="float8_e4m3fn", dtype="bfloat16", window=40),
    "e5m2 for float16": AttentionCase(ROWS, pool_dtype="float8_e5m2", dtype="float16"),
}
# Beside one-byte pools 16-bit products are bfloat16's.
TOLERANCE_OF_OTHERS = {"e5m2 for float16": 1.5e-2}


@pytest.mark.parametrize("name", OTHERS)
def test_special_batches_equal_the_dense_answer(name: str) -> None:
    check(OTHERS[name], atol=TOLERANCE_OF_OTHERS.get(name))


def test_a_step_of_decodes_only_has_no_prefill_launch() -> None:
    check(AttentionCase(((1, 1), (1, 16), (1, 900), (1, 300)), tokens=9), has_prefill=False)


def test_chunks_that_the_grid_has_no_programs_for_are_taken_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "_PROGRAMS", 8)
    check(AttentionCase(((1, 700), (1, 30), (1, 520), (1, 257)), heads=4, kv_heads=2, head_dim=32), has_prefill=False)


@given(
    rows=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 300)), min_size=5, max_size=5),
    seed=st.integers(0, 1000),
    window=st.sampled_from([None, 23]),
)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_ragged_batch_equals_the_dense_answer(rows: list[tuple[int, int]], seed: int, window: int | None) -> None:
    ragged = sorted(((queries, queries + before) for queries, before in rows), key=lambda row: row[0] > 3)
    check(
        AttentionCase(  # one shape for all examples: they share a compiled program
            tuple(ragged),
            window=window,
            heads=3,
            kv_heads=1,
            head_dim=16,
            decode_queries=3,
            tokens=220,
            num_blocks=120,
            max_blocks=23,
            seed=seed,
        )
    )


def test_a_row_has_the_same_bits_alone_and_in_any_batch() -> None:
    """In float32, where no rounding of the result hides a difference."""
    batch = AttentionCase(((2, 37), (1, 600), (2, 5), (70, 100), (9, 9)), decode_queries=2, head_dim=32)
    arrays, starts = batch.arrays, batch.arrays["query_start"]
    together = run(batch)
    q = arrays["q"][:72]  # a smaller bucket of tokens, rows and blocks
    for row, (queries, length) in enumerate(batch.rows):
        mine = slice(starts[row], starts[row + 1])
        alone = run(
            batch,
            q=np.concatenate([arrays["q"][mine], q[queries:]]),
            query_start=np.array([0, queries, queries], np.int32),
            kv_lens=np.array([length, 0], np.int32),
            num_decode=np.int32(queries <= 2),
            block_tables=arrays["block_tables"][[row, -1], :-1],
        )
        assert np.array_equal(together[mine], alone[:queries])
        assert not alone[queries:].any()


def _shapes(case: dict[str, object]) -> dict[str, jax.ShapeDtypeStruct]:
    tokens, rows, width, blocks, size = 96, 24, 64, 300, case.get("block_size", 16)
    heads, kv_heads, dim = case["heads"]
    int32, pool_dtype = jnp.int32, case.get("pool", case.get("dtype", "bfloat16"))
    shape = jax.ShapeDtypeStruct
    shapes = {
        "q": shape((tokens, heads, dim), case.get("dtype", "bfloat16")),
        "k_cache": shape((blocks, size, kv_heads, dim), pool_dtype),
        "v_cache": shape((blocks, size, kv_heads, dim), pool_dtype),
        "query_start": shape((rows + 1,), int32),
        "kv_lens": shape((rows,), int32),
        "block_tables": shape((rows, width), int32),
        "num_decode": shape((), int32),
    }
    if jnp.dtype(pool_dtype).itemsize == 1:
        shapes |= {name: shape((blocks, size, kv_heads), jnp.float32) for name in ("k_scale", "v_scale")}
    if case.get("tree"):
        shapes["tree"] = shape((rows, case["queries"], -(-case["queries"] // 32)), jnp.uint32)
    return shapes


LOWERED = {
    "decode": {"heads": (32, 8, 128), "has_prefill": False},
    "mixed": {"heads": (32, 8, 128)},
    "float32": {"heads": (9, 3, 64), "dtype": "float32"},
    "float16, no power of two": {"heads": (32, 32, 80), "dtype": "float16", "block_size": 24},
    "large heads": {"heads": (16, 8, 256), "window": 1024, "soft_cap": 50.0},
    "verify": {"heads": (32, 8, 128), "queries": 5},
    "tree": {"heads": (32, 8, 128), "queries": 40, "tree": True},
    "int8": {"heads": (32, 8, 128), "pool": "int8"},
    "e4m3": {"heads": (32, 8, 128), "pool": "float8_e4m3fn"},
    "e5m2": {"heads": (24, 8, 96), "pool": "float8_e5m2"},
}


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("case", LOWERED.values(), ids=LOWERED.keys())
def test_lowers_for_nvidia_gpus(case: dict[str, object]) -> None:
    @jax.jit
    def step(
        q: jax.Array, k_cache: jax.Array, v_cache: jax.Array, tree: jax.Array | None = None, **arrays: jax.Array
    ) -> jax.Array:
        scales = {name: arrays.pop(name) for name in ("k_scale", "v_scale") if name in arrays}
        queries, has_prefill = case.get("queries", 1), case.get("has_prefill", True)
        plan = make_plan(**arrays, num_tokens=96, decode_queries=queries, has_prefill=has_prefill, tree=tree)
        options = {name: case.get(name) for name in ("window", "soft_cap")}
        return triton.paged_attention(q, k_cache, v_cache, plan, scale=0.1, **options, **scales)

    with pretended_gpu():
        text = step.trace(**_shapes(case)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count(TRITON_CALL) == (3 if case.get("has_prefill", True) else 2)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "elements", "capability", "reason"),
    [
        (64, "float32", 0, 75, "it needs compute capability 8.0, and a GPU has 7.5"),
        (512, "bfloat16", 0, 90, "head dims up to 256, not 512"),
        (64, "float64", 0, 90, "it serves KV of float32, bfloat16, .*, not float64"),
        (64, "float8_e4m3fn", 0, 80, "float8_e4m3fn needs compute capability 8.9, not 8.0"),
        (64, "int8", 2**31 + 1, 90, "a pool of int8 may have 2147483648 elements"),
    ],
)
def test_refuses_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, head_dim: int, dtype: str, elements: int, capability: int, reason: str
) -> None:
    monkeypatch.setattr(tuning, "target", lambda: tuning.Target("a GPU", capability))
    with pytest.raises(ValueError, match=reason):
        select_backend("triton", head_dim=head_dim, dtype=dtype, num_elements=elements)
    name, why = select_backend("auto", head_dim=head_dim, dtype=dtype, num_elements=elements)
    assert name == "cpu" or why.startswith("not triton: ")


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e5m2", "float8_e4m3fn"])
def test_is_the_choice_on_gpus(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    monkeypatch.setattr(tuning, "target", lambda: tuning.Target("NVIDIA L4", 89))
    assert select_backend("auto", head_dim=128, dtype=dtype, tree=True, num_elements=2**31)[0] == "triton"


def test_refuses_pools_that_turn_out_too_large() -> None:
    case = {"heads": (8, 8, 128), "pool": "int8"}
    shapes = _shapes(case)
    large = jax.ShapeDtypeStruct((2**17 + 1, 16, 8, 128), jnp.int8)
    plan = jax.eval_shape(
        partial(make_plan, num_tokens=96),
        *(shapes[name] for name in ("query_start", "kv_lens", "block_tables", "num_decode")),
    )
    with pytest.raises(ValueError, match="Triton attention cannot serve this: a pool of int8 may have"):
        jax.eval_shape(partial(triton.paged_attention, scale=1.0), shapes["q"], large, large, plan)


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 120])
def test_every_chip_has_sizes_for_every_shape(monkeypatch: pytest.MonkeyPatch, capability: int) -> None:
    monkeypatch.setattr(tuning, "target", lambda: tuning.Target("NVIDIA Unheard Of", capability))
    for kind in ("decode", "prefill"):
        for dtype in ("float32", "bfloat16", "int8"):
            for head_dim in (32, 80, 128, 256):
                sizes = triton.default_sizes(kind, head_dim, dtype)
                assert all(size & (size - 1) == 0 and size >= 16 for size in (sizes.rows, sizes.keys))
                assert 256 % sizes.keys == 0, "chunks are whole steps"


def test_special_sizes_go_over_general_ones() -> None:
    general = tuning.lookup("paged_attention", "sm_90", "prefill/b2/d128")
    special = tuning.lookup("paged_attention", "SM 90", "prefill/b2/d256")
    assert special == general | {"num_warps": 8} != general
    assert tuning.lookup("paged_attention", "NVIDIA Unheard Of", "prefill/b2/d128") == {}
