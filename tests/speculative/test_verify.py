"""Which drafts are kept, against a walk along the path, or down the tree."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.layers import KVCache
from jaxserve.plan import RowPlan
from jaxserve.runner.batch import make_step_input
from jaxserve.runner.buckets import Bucket, Buckets
from jaxserve.runner.programs import Newest, compact, decoder_input
from jaxserve.sampling import RowState, make_sampling_input
from jaxserve.sampling_params import SamplingParams
from jaxserve.speculative import NO_DRAFT, DraftState, Proposal, find_places, find_reached

WIDTH = 5
ROWS = 3


def plan(row: int, num_drafts: int) -> RowPlan:
    tokens = (-1,)
    return RowPlan("r", row, 9, 1 + num_drafts, tokens, num_drafts, True, False, (), 1, (1,), SamplingParams(), 0)


@given(
    drafts=st.lists(st.lists(st.integers(0, 1), max_size=WIDTH), min_size=ROWS, max_size=ROWS),
    counts=st.lists(st.integers(0, WIDTH), min_size=ROWS, max_size=ROWS),
    sampled=st.lists(st.integers(0, 1), min_size=ROWS * (WIDTH + 1), max_size=ROWS * (WIDTH + 1)),
)
def test_a_path_is_kept_up_to_its_first_wrong_draft(
    drafts: list[list[int]], counts: list[int], sampled: list[int]
) -> None:
    padded = np.array([[*row, *[NO_DRAFT] * WIDTH][:WIDTH] for row in drafts], np.int32)
    state = _put(DraftState.empty(ROWS, WIDTH), np.arange(ROWS), Proposal(padded))
    params = make_sampling_input([plan(r, n) for r, n in enumerate(counts)], ROWS * (WIDTH + 1), ROWS)
    _, found, reached, newest = (np.asarray(x) for x in _verify(state, params, np.array(sampled, np.int32)))
    first = 0
    for row, count in enumerate(counts):
        kept = 1
        while kept <= count and padded[row, kept - 1] == sampled[first + kept - 1]:
            kept += 1
        at = slice(first, first + 1 + count)
        assert reached[at].tolist() == [True] * kept + [False] * (1 + count - kept)
        assert newest[at].tolist() == [place == kept - 1 for place in range(1 + count)]
        context = [[*padded[row, :node], *[NO_DRAFT] * (WIDTH - node)] for node in range(1 + count)]
        assert found[at].tolist() == context
        first += 1 + count


NODES = 40  # more than a word of bits


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Tokens and parents of NODES drafts; those that follow one node are distinct."""
    rng = draw(st.randoms(use_true_random=False))
    parents = [rng.randrange(min(node, rng.choice((1, 3, NODES)))) for node in range(1, NODES + 1)]
    tokens = [parents[: at + 1].count(parent) - 1 for at, parent in enumerate(parents)]
    return tokens, parents


def path_to(node: int, parents: Sequence[int]) -> list[int]:
    """The nodes from the first after the root to this one."""
    return [] if node == 0 else [*path_to(parents[node - 1], parents), node]


def drafted(forest: Sequence[tuple[list[int], list[int]]]) -> DraftState:
    tokens, parents = (np.array(x, np.int32) for x in zip(*forest, strict=True))
    return _put(DraftState.empty(ROWS, NODES, is_tree=True), np.arange(ROWS), Proposal(tokens, parents))


_put = jax.jit(DraftState.put)
_input = jax.jit(decoder_input, static_argnames="bucket")
_compact = jax.jit(compact, static_argnames="backend")


@jax.jit
def _verify(drafts: DraftState, params: object, sampled: jax.Array) -> tuple[jax.Array, ...]:
    places = find_places(drafts, params)  # type: ignore[arg-type]
    return places.depth, places.context, *find_reached(places, sampled, drafts.width)


forests = st.lists(trees(), min_size=ROWS, max_size=ROWS)
numbers = st.lists(st.integers(0, NODES), min_size=ROWS, max_size=ROWS)


@given(forest=forests, counts=numbers, goals=numbers)
@settings(max_examples=40, deadline=None)
def test_the_kept_path_of_a_tree_is_that_of_a_walk(
    forest: list[tuple[list[int], list[int]]], counts: list[int], goals: list[int]
) -> None:
    """Sampling leads to a goal, as far as the tree was verified; elsewhere it says what no draft says."""
    size = ROWS * (NODES + 1)
    sampled, first = np.full(size, NODES, np.int32), 0
    for (tokens, parents), count, goal in zip(forest, counts, goals, strict=True):
        for node in path_to(goal, parents):
            if parents[node - 1] <= count:
                sampled[first + parents[node - 1]] = tokens[node - 1]
        first += 1 + count
    params = make_sampling_input([plan(r, n) for r, n in enumerate(counts)], size, ROWS)
    depth, context, reached, newest = (np.asarray(x) for x in _verify(drafted(forest), params, sampled))
    first = 0
    for (tokens, parents), count, goal in zip(forest, counts, goals, strict=True):
        kept = [node for node in path_to(goal, parents) if node <= count]
        at = slice(first, first + 1 + count)
        assert np.flatnonzero(reached[at]).tolist() == [0, *kept]
        assert np.flatnonzero(newest[at]).tolist() == [[0, *kept][-1]]
        for node in range(1 + count):
            path = path_to(node, parents)
            assert depth[first + node] == len(path)
            expected = np.full(NODES, NO_DRAFT)
            expected[np.array(path, int) - 1] = [tokens[at - 1] for at in path]
            assert context[first + node].tolist() == expected.tolist()
        first += 1 + count
    assert reached[first:].all(), "padding is a row of one place each"


@given(forest=forests, counts=numbers)
@settings(max_examples=25, deadline=None)
def test_a_node_sees_its_path_and_stands_behind_it(
    forest: list[tuple[list[int], list[int]]], counts: list[int]
) -> None:
    """Beside a chunk of a prompt, which is no verify although it is as short."""
    chunk = RowPlan("p", 0, 4, 3, (5, 6, 7), 0, True, False, (), 9, (9,), SamplingParams(), 0)
    rows = [chunk, *(plan(row, count) for row, count in enumerate(counts) if row)]
    buckets = Buckets(128, ROWS, NODES)
    step = make_step_input(rows, Bucket(128, ROWS, has_prefill=True, queries=NODES + 1), max_blocks=2, buckets=buckets)
    newest = Newest(jnp.zeros(ROWS + 1, jnp.int32), jnp.full(ROWS + 1, 10, jnp.int32), drafted(forest))
    kv = KVCache.zeros(1, (10, 64, 1, 8), jnp.dtype("float32"))
    inputs = _input(step, newest, kv, bucket=Bucket(128, ROWS, has_prefill=True, queries=NODES + 1))
    positions, slots, bits = (np.asarray(x) for x in (inputs.positions, inputs.slots, inputs.plan.tree))
    assert positions[:3].tolist() == [4, 5, 6]
    sees = bits[:, :, np.arange(NODES + 1) // 32] >> np.arange(NODES + 1, dtype=np.uint32) % 32 & 1
    assert np.array_equal(sees[0, :3], np.tri(3, NODES + 1))
    first = 3
    for row in range(1, ROWS):
        parents = forest[row][1]
        for node in range(1 + counts[row]):
            path = [0, *path_to(node, parents)]
            assert np.flatnonzero(sees[row, node]).tolist() == path
            assert positions[first + node] == 9 + len(path) - 1
            assert slots[first + node] == 64 + 9 + node
        first += 1 + counts[row]


@given(forest=forests, goals=numbers)
@settings(max_examples=25, deadline=None)
def test_right_drafts_move_together_and_nothing_else_moves(
    forest: list[tuple[list[int], list[int]]], goals: list[int]
) -> None:
    size, blocks = 4, 16
    tables = np.random.default_rng(sum(goals)).permutation(np.arange(1, 1 + ROWS * blocks)).reshape(ROWS, blocks)
    shape = (1 + ROWS * blocks, size, 1, 2)
    kv = KVCache.zeros(2, shape, jnp.dtype("float32"))
    numbers = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    kv = jax.tree.map(lambda pool: pool + numbers, kv)
    slots = (tables[:, :, None] * size + np.arange(size)).reshape(ROWS, -1)
    expected = numbers.reshape(-1, 2).copy()
    paths = np.zeros((ROWS + 1, NODES + 1), np.int32)
    length, path_length = np.ones((2, ROWS + 1), np.int32)
    for row, goal in enumerate(goals):
        path = [0, *path_to(goal, forest[row][1])]
        paths[row, : len(path)] = np.array(path) + 100 * row
        start, path_length[row] = 5 + row, len(path)
        length[row] = start + len(path) + 1
        expected[slots[row, start : start + len(path)]] = numbers.reshape(-1, 2)[slots[row, start + np.array(path)]]
    rows = RowState.zeros(ROWS, 8).replace(path=paths, length=length, path_length=path_length)
    moved = _compact(kv, rows, np.arange(ROWS), tables.astype(np.int32), backend="reference")
    for pool in jax.tree.leaves(moved):
        assert np.array_equal(np.asarray(pool).reshape(-1, 2), expected)
