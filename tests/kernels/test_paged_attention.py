"""Paged attention against a dense answer."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pallas_kernels.paged_attention import make_plan, paged_attention, select_backend
from pallas_kernels.paged_attention.plan import PREFILL_TILE
from tests.kernels.cases import AttentionCase


@partial(jax.jit, static_argnames=("window", "soft_cap", "backend"))
def attend(a: dict[str, jax.Array], *, window: int | None, soft_cap: float | None, backend: str) -> jax.Array:
    plan = make_plan(a["query_start"], a["kv_lens"], a["block_tables"], a["num_decode"], num_tokens=a["q"].shape[0])
    scale = a["q"].shape[-1] ** -0.5
    return paged_attention(a["q"], a["k"], a["v"], plan, scale=scale, window=window, soft_cap=soft_cap, backend=backend)


def run(case: AttentionCase, backend: str, **changes: object) -> np.ndarray:
    arrays = {**case.arrays, **changes}
    return np.asarray(attend(arrays, window=case.window, soft_cap=case.soft_cap, backend=backend), np.float32)


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
    case = AttentionCase(((1, 20), (4, 50), (3, 3), (2, 131), (70, 90)), window=40)

    @jax.jit
    def verify(a: dict[str, jax.Array]) -> jax.Array:
        plan = make_plan(
            a["query_start"],
            a["kv_lens"],
            a["block_tables"],
            jax.numpy.int32(4),
            num_tokens=a["q"].shape[0],
            decode_queries=4,
        )
        scale = case.head_dim**-0.5
        return paged_attention(a["q"], a["k"], a["v"], plan, scale=scale, window=case.window, backend=backend)

    np.testing.assert_allclose(np.asarray(verify(case.arrays)), case.expected(), atol=2e-6, rtol=2e-5)


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


def test_backends_are_chosen_and_refuse_with_a_reason() -> None:
    assert select_backend("reference", head_dim=64, dtype="float32") == ("reference", "asked for")
    with pytest.raises(ValueError, match=r"unknown attention backend 'flash'; there are: auto, cpu, reference"):
        select_backend("flash", head_dim=64, dtype="float32")
    with pytest.raises(ValueError, match="'cpu' cannot be used: it serves head dims that are multiples of 16"):
        select_backend("cpu", head_dim=40, dtype="float32")
    name, why = select_backend("auto", head_dim=40, dtype="float32")
    assert name == "reference"
    assert "not cpu: it serves head dims" in why
