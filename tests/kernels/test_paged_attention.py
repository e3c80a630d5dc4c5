"""Paged attention against a dense answer."""

from __future__ import annotations

from functools import cache, partial

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pallas_kernels.paged_attention import make_plan, paged_attention, select_backend
from pallas_kernels.paged_attention.api import Backend
from pallas_kernels.paged_attention.plan import PREFILL_TILE, max_chunks
from tests.kernels.cases import AttentionCase, attend


@cache
def named(backend: str) -> Backend:
    return partial(paged_attention, backend=backend)


def run(case: AttentionCase, backend: str, **changes: np.ndarray) -> np.ndarray:
    return attend(case, named(backend), **changes)


CASES = {
    "decodes": AttentionCase(((1, 1), (1, 15), (1, 16), (1, 17), (1, 300))),
    "prompt": AttentionCase(((150, 150),)),
    "chunk of a prompt": AttentionCase(((70, 200),)),
    "mixed": AttentionCase(((1, 9), (1, 140), (2, 2), (65, 65), (64, 100), (3, 257))),
    "block of 8": AttentionCase(((1, 9), (20, 41)), block_size=8),
    "block of 64": AttentionCase(((1, 70), (20, 141)), block_size=64),
    "block wider than a chunk": AttentionCase(((1, 300), (20, 141)), block_size=256),
    "window": AttentionCase(((1, 300), (1, 5), (90, 290)), window=33),
    "window of one": AttentionCase(((1, 20), (5, 20)), window=1),
    "soft cap": AttentionCase(((1, 30), (20, 40)), soft_cap=5.0),
    "one KV head": AttentionCase(((1, 30), (20, 40)), heads=4, kv_heads=1, head_dim=32),
    "no groups": AttentionCase(((1, 30), (20, 40)), heads=4, kv_heads=4, head_dim=80),
    "more rows than a group": AttentionCase(tuple((1, 10 * n + 1) for n in range(19))),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_equals_the_dense_answer(case: AttentionCase, backend: str) -> None:
    np.testing.assert_allclose(run(case, backend), case.expected(), atol=2e-6, rtol=2e-5)


@given(
    rows=st.lists(st.tuples(st.integers(1, 80), st.integers(0, 150)), min_size=6, max_size=6),
    window=st.sampled_from([None, 23]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_ragged_batch_equals_the_dense_answer(
    backend: str, rows: list[tuple[int, int]], window: int | None, seed: int
) -> None:
    ragged = sorted(((queries, queries + before) for queries, before in rows), key=lambda row: row[0] > 1)
    case = AttentionCase(  # one shape for all examples: they share a compiled program
        tuple(ragged),
        window=window,
        heads=4,
        kv_heads=2,
        head_dim=16,
        tokens=480,
        num_blocks=100,
        max_blocks=20,
        seed=seed,
    )
    np.testing.assert_allclose(run(case, backend), case.expected(), atol=2e-6, rtol=2e-5)


def test_rows_of_several_tokens_can_be_decodes(backend: str) -> None:
    """The verify of drafts: up to ``decode_queries`` tokens of a row, attended with the decodes."""
    case = AttentionCase(((1, 20), (4, 50), (3, 3), (2, 131), (70, 90)), decode_queries=4, window=40)
    assert case.arrays["num_decode"] == 4

    np.testing.assert_allclose(run(case, backend), case.expected(), atol=2e-6, rtol=2e-5)


TREES = {
    "of one word": AttentionCase(((1, 20), (5, 50), (8, 8), (3, 131), (70, 90)), decode_queries=8, tree=True),
    "of two words": AttentionCase(((40, 300), (1, 7), (33, 40)), decode_queries=40, tree=True),
    "in a window": AttentionCase(((5, 50), (8, 200), (30, 90)), decode_queries=8, tree=True, window=6),
    "larger than a tile": AttentionCase(((70, 90), (3, 3), (80, 200)), decode_queries=80, tree=True, window=90),
    "with a soft cap": AttentionCase(((7, 40), (20, 60), (50, 70)), decode_queries=20, tree=True, soft_cap=3.0),
}


@pytest.mark.parametrize("case", TREES.values(), ids=TREES.keys())
def test_queries_of_a_verify_see_what_the_tree_says(case: AttentionCase, backend: str) -> None:
    np.testing.assert_allclose(run(case, backend), case.expected(), atol=2e-6, rtol=2e-5)


def test_a_tree_that_is_a_chain_is_causal(backend: str) -> None:
    tree, causal = (AttentionCase(((5, 50), (2, 9)), decode_queries=5, tree=tree) for tree in (True, False))
    chain = np.broadcast_to(np.uint32(2) << np.arange(5, dtype=np.uint32)[:, None], (3, 5, 1)) - np.uint32(1)
    arrays = {name: tree.arrays[name] for name in ("q", "k", "v", "block_tables")}
    assert np.array_equal(run(tree, backend, tree=chain), run(causal, backend, **arrays))


@pytest.mark.parametrize(
    ("pool_dtype", "scales", "atol"),
    [
        ("int8", "float32", 2e-6),
        ("int8", "float16", 2e-3),
        ("float8_e4m3fn", "float32", 2e-6),
        ("float8_e5m2", "float32", 2e-6),
    ],
)
def test_quantised_pools_are_multiplied_out(pool_dtype: str, scales: str, atol: float) -> None:
    case = AttentionCase(((1, 40), (3, 150), (30, 60)), decode_queries=3, pool_dtype=pool_dtype)
    rounded = {name: case.arrays[name].astype(scales) for name in ("k_scale", "v_scale")}
    np.testing.assert_allclose(run(case, "reference", **rounded), case.expected(), atol=atol, rtol=2e-5)


def test_scales_come_in_pairs() -> None:
    case = AttentionCase(((1, 4),), pool_dtype="int8")
    del case.arrays["v_scale"]
    with pytest.raises(ValueError, match="k_scale and v_scale belong together"):
        run(case, "reference")


def test_native_attention_refuses_quantised_pools() -> None:
    with pytest.raises(ValueError, match="no quantised pools"):
        run(AttentionCase(((1, 4),), pool_dtype="int8"), "cpu")


def test_a_row_does_not_depend_on_the_rows_around_it(backend: str) -> None:
    batch = AttentionCase(((1, 37), (1, 500), (1, 2), (70, 100)))
    together = run(batch, backend)[0]
    arrays = batch.arrays
    alone = run(
        batch,
        backend,
        query_start=np.array([0, 1, 1, 1, 1, 1], np.int32),
        kv_lens=np.array([37, 0, 0, 0, 0], np.int32),
        num_decode=np.int32(1),
        block_tables=arrays["block_tables"],
    )[0]
    assert np.array_equal(together, alone)


@pytest.mark.parametrize(("dtype", "atol"), [("bfloat16", 2e-2), ("float16", 3e-3)])
def test_pools_are_read_in_their_own_precision(backend: str, dtype: str, atol: float) -> None:
    case = AttentionCase(((1, 40), (30, 60)))
    low = {name: jax.numpy.asarray(case.arrays[name], dtype) for name in "qkv"}
    np.testing.assert_allclose(run(case, backend, **low), case.expected(), atol=atol)


def test_prefill_items_cover_every_query_token_once() -> None:
    lens = np.array([1, 64, 65, 7, 200])
    starts = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    plan = make_plan(starts, lens.astype(np.int32), np.zeros((5, 1), np.int32), np.int32(1), num_tokens=int(lens.sum()))
    covered = [
        starts[row] + offset + at
        for row, offset in zip(plan.item_row[: plan.num_items], plan.item_start[: plan.num_items], strict=True)
        for at in range(min(PREFILL_TILE, lens[row] - offset))
    ]
    assert sorted(covered) == list(range(1, lens.sum()))


plan_of = jax.jit(make_plan, static_argnames=("num_tokens", "decode_queries"))


@given(lens=st.tuples(*[st.integers(0, 400_000)] * 5), decodes=st.integers(0, 5), queries=st.sampled_from([1, 4]))
@settings(max_examples=40)
def test_chunks_cover_every_cached_token_of_the_decodes_once(lens: tuple[int, ...], decodes: int, queries: int) -> None:
    starts = np.cumsum([0, *(min(queries, n) for n in lens), 0]).astype(np.int32)
    kv_lens = np.array([*lens, 0], np.int32)
    tables = np.zeros((6, 1), np.int32)
    plan = plan_of(starts, kv_lens, tables, np.int32(decodes), num_tokens=5 * queries + 2, decode_queries=queries)
    expected = []
    for row, length in enumerate(lens[:decodes]):
        chunk = int(plan.chunk[row])
        assert chunk % 256 == 0
        assert -(-length // chunk) <= max_chunks(400_000, queries) <= 32
        expected += [(row, index) for index in range(-(-length // chunk))]
    num = int(plan.num_chunks)
    assert list(zip(plan.chunk_row.tolist()[:num], plan.chunk_index.tolist()[:num], strict=True)) == expected
    tokens = int(starts[decodes])
    assert plan.token_row.tolist()[:tokens] == np.repeat(range(6), np.diff(starts)).tolist()[:tokens]


def test_how_a_row_is_cut_follows_from_its_own_length_only() -> None:
    lens = np.array([5, 300, 9000, 70_000], np.int32)
    make = partial(plan_of, block_tables=np.zeros((4, 1), np.int32), num_decode=np.int32(4), num_tokens=9)
    together = make(np.arange(5, dtype=np.int32), lens)
    for row, length in enumerate(lens):
        alone = make(np.minimum(np.arange(5), 1).astype(np.int32), np.array([length, 0, 0, 0], np.int32))
        assert alone.chunk[0] == together.chunk[row]
        assert alone.num_chunks == (together.chunk_row[: together.num_chunks] == row).sum()


def test_backends_are_chosen_and_refuse_with_a_reason() -> None:
    assert select_backend("reference", head_dim=64, dtype="float32") == ("reference", "asked for")
    with pytest.raises(ValueError, match=r"unknown attention backend 'flash'; there are: auto, triton, cpu, reference"):
        select_backend("flash", head_dim=64, dtype="float32")
    with pytest.raises(ValueError, match="'cpu' cannot be used: it serves head dims that are multiples of 16"):
        select_backend("cpu", head_dim=40, dtype="float32")
    name, why = select_backend("auto", head_dim=40, dtype="float32")
    assert name == "reference"
    assert why.startswith("not triton: it runs on NVIDIA GPUs only; not cpu: it serves head dims")
    with pytest.raises(ValueError, match="'triton' cannot be used: it runs on NVIDIA GPUs only"):
        select_backend("triton", head_dim=64, dtype="float32")
    assert select_backend("auto", head_dim=64, dtype="int8")[0] == "reference"
    assert select_backend("auto", head_dim=64, dtype="float32", tree=True)[0] == "cpu"
