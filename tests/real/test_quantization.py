"""The packaged Q4_1 file with its blocks kept in memory: the same values, hence the same tokens."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.config import ModelOptions
from jaxserve.models import Use
from jaxserve.quantization import PackedLeaf, WeightForm
from jaxserve.weights import OpenedModel, Params, open_model
from pallas_kernels.packed_matmul import unpack
from tests.models.dense import all_logits


@pytest.fixture(scope="module")
def opened() -> OpenedModel:
    return open_model(ModelOptions("smollm2-135m", weight_cache_dir="off"))


@pytest.fixture(scope="module")
def kept(opened: OpenedModel) -> Params:
    return opened.load("float32", form=WeightForm("gguf"))


def test_every_matrix_is_kept_in_a_fifth_of_the_memory_with_the_values_of_floats(
    opened: OpenedModel, kept: Params
) -> None:
    floats = opened.load("float32")
    leaves = jax.tree.leaves(kept, is_leaf=lambda leaf: isinstance(leaf, PackedLeaf))
    for spec, leaf, array in zip(jax.tree.leaves(opened.specs), leaves, jax.tree.leaves(floats), strict=True):
        assert isinstance(leaf, PackedLeaf) == spec.is_factor
        if isinstance(leaf, PackedLeaf):
            whole = np.asarray(unpack(leaf.weight))
            assert np.array_equal(whole.T if spec.use is Use.LOGITS else whole, np.asarray(array))
    assert {leaf.kind for leaf in leaves if isinstance(leaf, PackedLeaf)} == {"int4", "int8"}
    size = sum(array.nbytes for array in jax.tree.leaves(kept))
    assert size < 0.2 * sum(array.nbytes for array in jax.tree.leaves(floats))


def test_greedy_tokens_are_those_of_the_served_model(llm: LLM, kept: Params) -> None:
    prompts = [llm.tokenizer.encode(text) for text in ("The capital of France is", "def fibonacci(n):")]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        tokens = list(output.outputs[0].token_ids)
        best = all_logits(kept, llm.model_config, prompt + tokens).argmax(axis=1)
        assert best[len(prompt) - 1 : -1].tolist() == tokens
