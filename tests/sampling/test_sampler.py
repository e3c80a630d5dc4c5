"""The sampling pipeline against a plain numpy oracle, and the promises about its noise."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from jaxserve.plan import RowPlan
from jaxserve.sampling import RowState, Sampled, SamplingInput, history_counts, make_sampling_input, sample
from jaxserve.sampling.arrays import IN_PROMPT, MOST_COUNTED
from jaxserve.sampling.filters import keep_likely
from jaxserve.sampling_params import SamplingParams

V = 50
ROWS = 16


@jax.jit
def _sample(
    logits: jax.Array, state: RowState, params: SamplingInput, mask: jax.Array, masked: jax.Array
) -> tuple[Sampled, RowState]:
    """Every place is its row's only one."""
    alone = jnp.full((ROWS, 0), -1)
    sampled = sample(logits, state, params, mask, masked, positions=params.positions, context=alone)
    all_kept = jnp.ones(ROWS, bool)
    return sampled, state.record(params, sampled.tokens, params.positions, jnp.zeros(ROWS, int), all_kept, all_kept)


def row_plan(params: SamplingParams, *, row: int = 0, seed: int = 7, history: tuple[int, ...] = (1, 2, 3)) -> RowPlan:
    return RowPlan("r", row, len(history) - 1, 1, (history[-1],), 0, True, True, history, 2, (1,), params, seed)


def run(
    logits: NDArray[np.float32], plans: list[RowPlan], mask: NDArray[np.uint32] | None = None
) -> tuple[Sampled, RowState]:
    """Sample a step of ``plans`` (padded to ROWS) from logits [len(plans), V]."""
    state = RowState.zeros(ROWS, V)
    counts, bias = np.array(state.counts), np.array(state.bias)
    for plan in plans:
        counts[plan.row] = history_counts(plan, V)
        for token, value in plan.params.logit_bias.items():
            bias[plan.row, token] = value
    state = state.replace(counts=counts, bias=bias)
    padded = np.zeros((ROWS, V), np.float32)
    padded[: len(plans)] = logits
    bits = np.full((ROWS, -(-V // 32)), 2**32 - 1, np.uint32)
    if mask is not None:
        bits[: len(plans)] = mask
    return _sample(padded, state, make_sampling_input(plans, ROWS, ROWS), bits, np.bool_(mask is not None))


def some_logits(seed: int = 0, rows: int = 1) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((rows, V)).astype(np.float32) * 3


def test_temperature_zero_takes_the_likeliest_token() -> None:
    logits = some_logits(rows=3)
    plans = [row_plan(SamplingParams(temperature=0), row=i) for i in range(3)]
    assert run(logits, plans)[0].tokens[:3].tolist() == logits.argmax(-1).tolist()


def test_greedy_and_random_rows_share_a_step() -> None:
    logits = some_logits(rows=2)
    greedy, hot = row_plan(SamplingParams(temperature=0)), row_plan(SamplingParams(temperature=5.0), row=1)
    tokens = [run(logits, [greedy, row_plan(hot.params, row=1, seed=s)])[0].tokens[:2].tolist() for s in range(12)]
    assert {first for first, _ in tokens} == {int(logits[0].argmax())}
    assert len({second for _, second in tokens}) > 1


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_k=40, top_p=0.95)])
def test_samples_follow_the_distribution(params: SamplingParams) -> None:
    logits = some_logits()
    kept = np.asarray(keep_likely(jnp.asarray(logits), make_sampling_input([row_plan(params)], 1, ROWS)))[0]
    expected = np.exp(kept - kept.max())
    expected /= expected.sum()
    draws = 3000
    plans = [[row_plan(params, row=r, seed=ROWS * i + r) for r in range(ROWS)] for i in range(draws // ROWS)]
    tokens = [t for step in plans for t in run(np.repeat(logits, ROWS, 0), step)[0].tokens.tolist()]
    counts = np.bincount(tokens, minlength=V)
    assert counts[expected == 0].sum() == 0
    likely = expected * draws > 5
    chi_square = ((counts - expected * draws) ** 2 / np.maximum(expected * draws, 1e-9))[likely].sum()
    freedom = likely.sum() - 1
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)


def test_noise_depends_on_seed_and_position_alone() -> None:
    params = SamplingParams(temperature=1.5)
    logits = some_logits(rows=2)
    alone = int(run(logits[:1], [row_plan(params, row=2)])[0].tokens[0])
    other = row_plan(SamplingParams(temperature=0.7, top_k=3), row=1, seed=99)
    batch = run(logits[::-1], [other, row_plan(params, row=3)])[0].tokens
    assert int(batch[1]) == alone
    later = [int(run(logits[:1], [row_plan(params, history=(1, 2, 3, *range(n)))])[0].tokens[0]) for n in range(1, 9)]
    assert len(set(later)) > 1


@pytest.mark.parametrize("seed", [0, 2**63 - 1, 2**64 - 1, -5])
def test_every_64_bit_seed_works_and_counts(seed: int) -> None:
    logits = np.zeros((1, V), np.float32)
    params = SamplingParams(seed=seed)
    drawn = [
        int(run(logits, [row_plan(params, seed=s, history=(1, 2, 3))])[0].tokens[0]) for s in (seed, seed, seed ^ 1)
    ]
    assert drawn[0] == drawn[1]
    spread = {int(run(logits, [row_plan(params, seed=seed ^ (1 << bit))])[0].tokens[0]) for bit in range(0, 64, 9)}
    assert len(spread) > 3


def oracle_filter(logits: NDArray[np.float64], k: int, p: float, m: float) -> NDArray[np.bool_]:
    probs = np.exp(logits - logits.max())
    keep = probs >= m * probs.max() * (1 - 1e-6)
    order = np.argsort(-logits, kind="stable")
    order = [t for t in order if keep[t]]
    if k > 0:
        order = order[:k]
    if p < 1.0:
        share = probs[order] / probs[order].sum()
        order = order[: int(np.searchsorted(np.cumsum(share), p - 1e-6)) + 1]
    kept = np.zeros(len(logits), bool)
    kept[order] = True
    return kept


@given(
    seed=st.integers(0, 10_000),
    k=st.sampled_from([-1, 0, 1, 2, 7, V - 1, V, 1000]),
    p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]),
    m=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
)
@settings(max_examples=80, deadline=None)
def test_filters_keep_what_a_sort_would_keep(seed: int, k: int, p: float, m: float) -> None:
    logits = some_logits(seed)
    params = make_sampling_input([row_plan(SamplingParams(top_k=k, top_p=p, min_p=m))], 1, ROWS)
    kept = np.isfinite(np.asarray(_keep(logits, params)))[0]
    assert kept.tolist() == oracle_filter(logits[0].astype(np.float64), k, p, m).tolist()


_keep = jax.jit(keep_likely)


def penalised(logits: NDArray[np.float32], params: SamplingParams, history: tuple[int, ...]) -> NDArray[np.float64]:
    """Oracle of the penalties; the first two tokens of the history are the prompt."""
    out = logits[0].astype(np.float64).copy()
    for token in set(history):
        out[token] = (
            out[token] / params.repetition_penalty if out[token] > 0 else out[token] * params.repetition_penalty
        )
    for token in set(history[2:]):
        out[token] -= params.frequency_penalty * history[2:].count(token) + params.presence_penalty
    return out


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, repetition_penalty=1.9),
        SamplingParams(temperature=0, presence_penalty=2.0),
        SamplingParams(temperature=0, frequency_penalty=-1.5),
        SamplingParams(temperature=0, frequency_penalty=1.0, presence_penalty=-0.7, repetition_penalty=0.5),
    ],
)
def test_penalties_equal_the_oracle(params: SamplingParams) -> None:
    for seed in range(15):
        logits = some_logits(seed)
        likely = np.argsort(-logits[0])[:4].tolist()
        history = (*likely[:2], likely[2], likely[2], likely[1], likely[3], likely[2])
        tokens = run(logits, [row_plan(params, history=history)])[0].tokens
        assert int(tokens[0]) == int(penalised(logits, params, history).argmax())


def test_repetition_penalty_counts_a_token_once_however_often_it_stands_there() -> None:
    logits = np.zeros((1, V), np.float32)
    logits[0, 5], logits[0, 6] = 4.0, 1.9
    once = row_plan(SamplingParams(temperature=0, repetition_penalty=2.0), history=(5,) * 80)
    assert int(run(logits, [once])[0].tokens[0]) == 5  # 4 / 2 > 1.9; divided twice it would lose


def test_sampled_tokens_are_counted_for_the_next_step() -> None:
    logits = some_logits()
    _, state = run(logits, [row_plan(SamplingParams(temperature=0, presence_penalty=2.0), history=(1, 2))])
    token = int(logits.argmax())
    assert int(state.counts[0, token]) == 1
    assert int(state.last_token[0]) == token


def test_counts_of_long_outputs_stay_at_their_end() -> None:
    most = int(MOST_COUNTED)
    plan = row_plan(SamplingParams(temperature=0, frequency_penalty=0.5), history=(1, 2, *[5] * (most + 9)))
    assert history_counts(plan, V)[[1, 5]].tolist() == [IN_PROMPT, most]
    logits = np.zeros((1, V), np.float32)
    logits[0, 5] = most
    sampled, state = run(logits, [plan])
    assert int(sampled.tokens[0]) == 5  # by half of its logit
    assert int(state.counts[0, 5]) == most
    assert int(run(logits * 0.4, [plan])[0].tokens[0]) != 5


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 2e-38, 1e-44])
def test_the_coldest_temperatures_take_the_likeliest_token(temperature: float) -> None:
    logits = 30 + some_logits()
    for filters in ({}, {"top_k": 5}, {"top_p": 1e-9}, {"min_p": 1.0}):
        plan = row_plan(SamplingParams(temperature=temperature, **filters))
        assert int(run(logits, [plan])[0].tokens[0]) == int(logits.argmax())


def test_bias_is_added_and_belongs_to_its_row() -> None:
    logits = some_logits(rows=2)
    plans = [
        row_plan(SamplingParams(temperature=0, logit_bias={9: 100.0})),
        row_plan(SamplingParams(temperature=0), row=1),
    ]
    assert run(logits, plans)[0].tokens[:2].tolist() == [9, int(logits[1].argmax())]


def test_masked_tokens_are_never_sampled() -> None:
    mask = np.zeros((1, 2), np.uint32)
    mask[0, 1] = 0b101  # tokens 32 and 34
    hot = SamplingParams(temperature=100.0)
    drawn = {int(run(some_logits(), [row_plan(hot, seed=s)], mask)[0].tokens[0]) for s in range(20)}
    assert drawn == {32, 34}


def test_processed_logprobs_are_those_that_tokens_were_sampled_from() -> None:
    logits = some_logits(rows=4)
    mode = {"logprobs": 5, "logprobs_mode": "processed_logprobs"}
    penalties = {"logit_bias": {3: 4.0}, "repetition_penalty": 1.5, "frequency_penalty": 0.5}
    cold, warm = (
        SamplingParams(temperature=0, **penalties, **mode),
        SamplingParams(temperature=0.5, top_k=4, **penalties, **mode),
    )
    raw = SamplingParams(temperature=0.5, top_k=4, **penalties, logprobs=5)
    plans = [row_plan(params, row=i) for i, params in enumerate((cold, warm, raw, SamplingParams(temperature=0)))]
    out, _ = run(logits, plans)
    history = np.array(plans[0].history)
    for row, params in enumerate((cold, warm, raw)):
        wanted = logits[row].astype(np.float64)
        if params is not raw:
            seen = np.unique(history)
            wanted[seen] = np.where(wanted[seen] > 0, wanted[seen] / 1.5, wanted[seen] * 1.5)
            wanted[history[2:]] -= 0.5  # the prompt is two tokens long
            wanted[3] += 4.0
        if params is warm:
            wanted = np.where(wanted >= np.sort(wanted)[-4], wanted / 0.5, -np.inf)
        wanted -= np.log(np.exp(wanted - wanted.max()).sum()) + wanted.max()
        best = np.argsort(-wanted, kind="stable")[:4]
        assert out.logprobs[row] == pytest.approx(wanted[int(out.tokens[row])], abs=1e-4)
        np.testing.assert_allclose(out.top_logprobs[row, :4], wanted[best], atol=1e-4)
        assert out.top_ids[row, :4].tolist() == best.tolist()
        assert np.isneginf(out.top_logprobs[row, 4]) == (params is warm)


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = some_logits()
    params = SamplingParams(temperature=0, logprobs=5, logit_bias={3: -100.0}, repetition_penalty=1.5)
    out = run(logits, [row_plan(params)])[0]
    expected = logits[0] - np.log(np.exp(logits[0].astype(np.float64)).sum())
    token = int(out.tokens[0])
    assert out.logprobs[0] == pytest.approx(expected[token], abs=1e-5)
    assert int(out.ranks[0]) == 1 + int((expected > expected[token]).sum())
    best = np.argsort(-expected)[:5]
    assert out.top_ids[0, :5].tolist() == best.tolist()
    np.testing.assert_allclose(out.top_logprobs[0, :5], expected[best], atol=1e-5)


def test_padding_rows_touch_only_the_dummy() -> None:
    plan = row_plan(SamplingParams(temperature=0), row=1)
    _, state = run(some_logits(), [plan])
    untouched: Any = np.delete(np.asarray(state.last_token), [1, ROWS])
    assert not untouched.any()
