"""A plan of the real model against the engine that serves it."""

from __future__ import annotations

import jax

from jaxserve import LLM
from jaxserve.config import EngineConfig
from jaxserve.engine.planning import make_plan
from jaxserve.sizing import PlanOptions
from tests.real.conftest import SETTINGS


def test_what_was_planned_is_what_is_allocated(llm: LLM) -> None:
    plan = make_plan(EngineConfig.from_flat({"model": "smollm2-135m", **SETTINGS}), PlanOptions(), {})
    runner, memory = llm.engine.runner, plan.memory

    def size(tree: object) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))

    assert sum(memory.weights.values()) == size(runner.params)
    assert memory.kv is not None
    assert (memory.kv.num_bytes, memory.rows) == (size(runner._state.kv), size(runner._state.rows))
    assert memory.max_model_len == SETTINGS["max_model_len"]
    assert plan.problems == ()
    # Scratch, as it was compiled to be served.
    forward = runner._forward[runner.buckets.forward()[-1]].memory_analysis()
    sample = runner._sample[runner.buckets.places[-1]].memory_analysis()
    assert 0 < forward.temp_size_in_bytes < memory.workspace.forward
    assert 0 < sample.temp_size_in_bytes < memory.workspace.sampling
