"""Which drafts typical acceptance keeps, against a walk down each row's tree."""

from __future__ import annotations

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sampling import make_sampling_input
from jaxserve.speculative import DraftState, Proposal, TypicalAcceptance, find_places, find_reached
from tests.speculative.test_verify import NODES, ROWS, drafted, forests, numbers, plan

RULE = TypicalAcceptance(threshold=0.12, alpha=0.5)
VOCAB = NODES + 1
_SIZE = ROWS * (NODES + 1)


@jax.jit
def _revise(drafts: DraftState, params: object, tokens: jax.Array, logits: jax.Array) -> tuple[jax.Array, ...]:
    places = find_places(drafts, params)  # type: ignore[arg-type]
    revised = RULE.revise(places, params, NODES, tokens, logits)  # type: ignore[arg-type]
    return revised, *find_reached(places, revised, NODES)


def keeps(logits: np.ndarray[tuple[int], np.dtype[np.float32]], draft: int) -> bool:
    weights = np.exp(logits - logits.max())
    p = weights / weights.sum()
    entropy = -sum(x * np.log(x) for x in p if x > 0)
    return bool(p[draft] > min(RULE.threshold, RULE.alpha * np.exp(-entropy)))


@given(forest=forests, counts=numbers, seed=st.integers(0, 1000), greedy=st.integers(0, ROWS - 1))
@settings(max_examples=30, deadline=None)
def test_the_longest_path_of_typical_drafts_is_kept(
    forest: list[tuple[list[int], list[int]]], counts: list[int], seed: int, greedy: int
) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(_SIZE, VOCAB)).astype(np.float32) * 2
    logits[:, :4] += 6.0  # the tokens of most drafts
    logits[rng.random(logits.shape) < 0.1] = -np.inf
    logits[:, -1] = 0.0
    sampled = rng.integers(0, 4, _SIZE).astype(np.int32)
    params = make_sampling_input([plan(r, n) for r, n in enumerate(counts)], _SIZE, ROWS)
    params = params.replace(temperature=np.where(params.rows == greedy, 0.0, 1.0).astype(np.float32))
    revised, reached, newest = (np.asarray(x) for x in _revise(drafted(forest), params, sampled, logits))
    first = 0
    for row, ((tokens, parents), count) in enumerate(zip(forest, counts, strict=True)):
        paths = {0: [0]}
        for node in range(1, 1 + count):
            parent, draft = parents[node - 1], tokens[node - 1]
            place = first + parent
            if parent in paths and (sampled[place] == draft or (row != greedy and keeps(logits[place], draft))):
                paths[node] = [*paths[parent], node]
        best = max(paths.values(), key=lambda path: (len(path), -path[-1]))
        expected = sampled[first : first + 1 + count].copy()
        for parent, node in pairwise(best):
            expected[parent] = tokens[node - 1]
        at = slice(first, first + 1 + count)
        assert revised[at].tolist() == expected.tolist()
        assert np.flatnonzero(reached[at]).tolist() == best
        assert np.flatnonzero(newest[at]).tolist() == best[-1:]
        first += 1 + count
    assert revised[first:].tolist() == sampled[first:].tolist()


def test_a_draft_that_cannot_be_is_never_kept() -> None:
    state = DraftState.empty(1, 1).put(np.array([0]), Proposal(np.array([[1]], np.int32)))
    params = make_sampling_input([plan(0, 1)], 2, 1).replace(temperature=np.ones(2, np.float32))
    places = find_places(state, params)
    for logit, kept in ((-np.inf, 0), (-1.0, 1)):
        logits = jnp.array([[0.0, logit], [0.0, 0.0]])
        assert RULE.revise(places, params, 1, jnp.zeros(2, jnp.int32), logits).tolist() == [kept, 0]
