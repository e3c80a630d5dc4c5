"""A plan as padded arrays, and the sizes it is padded to."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.plan import DEVICE_TOKEN, RowPlan, StepPlan
from jaxserve.runner.batch import make_step_input, order_rows
from jaxserve.runner.buckets import Bucket, Buckets
from jaxserve.runner.compiled import CompileCounter, Programs
from jaxserve.sampling_params import SamplingParams


def row(name: str, index: int, start: int, *tokens: int) -> RowPlan:
    blocks = tuple(range(10 * index + 1, 10 * index + 4))
    return RowPlan(name, index, start, len(tokens), tokens, 0, True, False, (), 1, blocks, SamplingParams(), 0)


@given(max_tokens=st.integers(1, 600), max_rows=st.integers(1, 100), data=st.data())
def test_every_step_has_a_bucket_that_holds_it_and_was_compiled(
    max_tokens: int, max_rows: int, data: st.DataObject
) -> None:
    max_tokens = max(max_tokens, max_rows)
    buckets = Buckets(max_tokens, max_rows)
    rows = data.draw(st.integers(1, max_rows))
    tokens = data.draw(st.integers(rows, max_tokens))
    mixed = buckets.pick(tokens, rows, has_prefill=True)
    decode = buckets.pick(rows, rows, has_prefill=False)
    assert mixed.tokens >= tokens
    assert mixed.rows >= rows
    assert rows <= decode.rows == decode.tokens < 2 * rows + 1
    assert {mixed, decode} <= set(buckets.forward())
    assert buckets.pick_rows(rows) in buckets.rows
    assert buckets.pick_places(rows) in buckets.places
    assert len(buckets.forward()) <= 34


def test_decodes_come_first_by_length_and_padding_is_empty() -> None:
    plan = StepPlan((row("long", 0, 4, 7, 8, 9), row("b", 1, 30, DEVICE_TOKEN), row("a", 2, 20, 5)))
    ordered = order_rows(plan, 1)
    assert [r.request_id for r in ordered] == ["a", "b", "long"]
    step = make_step_input(ordered, Bucket(8, 4, has_prefill=True), max_blocks=5, buckets=Buckets(8, 4))
    assert step.tokens.tolist() == [5, DEVICE_TOKEN, 7, 8, 9, 0, 0, 0]
    assert step.token_rows[:5].tolist() == [0, 1, 2, 2, 2]
    assert step.query_start.tolist() == [0, 1, 2, 5, 5]
    assert step.rows.tolist() == [2, 1, 0, 4]
    assert step.start.tolist() == [20, -1, 4, 0]
    assert step.block_tables.tolist() == [[21, 22, 23, 0, 0], [11, 12, 13, 0, 0], [1, 2, 3, 0, 0], [0] * 5]
    assert int(step.num_decode) == 2


def test_a_program_is_compiled_once_and_refuses_other_shapes() -> None:
    lowered = []

    def lower(size: int) -> jax.stages.Lowered:
        lowered.append(size)
        return jax.jit(lambda x: x + 1).lower(jnp.zeros(size))

    programs = Programs(lower)
    assert np.asarray(programs[3](jnp.zeros(3))).tolist() == [1, 1, 1]
    assert programs[3] is programs[3]
    assert lowered == [3]
    with pytest.raises(TypeError):
        programs[3](jnp.zeros(4))


def compile_something(size: int) -> None:
    jax.jit(lambda x: x * size - 1)(jnp.zeros(size)).block_until_ready()


def test_the_counter_sees_what_a_step_compiles_once_it_is_armed_and_nothing_else() -> None:
    counter = CompileCounter()
    try:
        with counter:
            compile_something(5)
        assert counter.count == 0
        counter.armed = True
        compile_something(7)
        assert counter.count == 0
        with counter:
            other = threading.Thread(target=compile_something, args=(9,))
            other.start()
            other.join()
            assert counter.count == 0
            compile_something(11)
        seen = counter.count
        assert seen >= 1
    finally:
        counter.close()
    with counter:
        compile_something(13)
    assert counter.count == seen
