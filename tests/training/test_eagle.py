"""An EAGLE head of a miniature: trained in seconds, and served; and what its passes see."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.cli import main
from jaxserve.training.distill import Texts
from jaxserve.training.eagle import Known, _attend, fit_product
from jaxserve.weights import open_eagle
from tests.training.conftest import CYCLE, FLAGS, SETTINGS

EAGLE = [*FLAGS, "--method", "eagle", "--num-passes", "2", "--steps", "60", "--batch-size", "160"]


@pytest.fixture(scope="module")
def trained(target: Path, data: Path) -> Path:
    """The folder of a head that was trained for it."""
    output = target.with_name("eagle")
    assert (
        main(["train-draft", str(target), str(data), "--output", str(output), *EAGLE, "--learning-rate", "0.01"]) == 0
    )
    return output


def test_a_trained_head_is_far_better_than_an_untrained_one(
    target: Path, data: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same command again does nothing but report."""
    before = (trained / "model.safetensors").read_bytes()
    argv = ["train-draft", str(target), str(data), "--output", str(trained), *EAGLE, "--learning-rate", "0.01"]
    assert main(argv) == 0
    assert (trained / "model.safetensors").read_bytes() == before
    found = re.search(r"tokens per step of a chain: ([\d.]+) \(untrained ([\d.]+)\)", capsys.readouterr().out)
    assert found is not None
    assert float(found[1]) > 2.5 > 1.2 > float(found[2])


def test_training_begins_with_the_product_that_fits_best() -> None:
    """States that are a product of the pairs before them, but for the first of each text, are found exactly."""
    rng = np.random.default_rng(0)
    size, lengths = 4, np.array([9, 1, 40, 25])
    tokens = rng.integers(5, 25, lengths.sum()).astype(np.int32)
    embed = rng.standard_normal((20, size)).astype(np.float32)
    product = rng.standard_normal((2 * size, size)).astype(np.float32) * 0.3
    hidden = rng.standard_normal((len(tokens), size)).astype(np.float32)
    starts = np.cumsum(lengths) - lengths
    for at in set(range(len(tokens))) - set(starts.tolist()):
        hidden[at] = np.concatenate([embed[tokens[at] - 5], hidden[at - 1]]) @ product
    known = Known(np.arange(5, 25, dtype=np.int32), embed, embed, None)
    fitted = fit_product({"fc": None, "layer": "as it is"}, known, Texts(tokens, hidden, lengths, lengths // 2))
    np.testing.assert_allclose(fitted["fc"], product, atol=5e-3)
    assert fitted["layer"] == "as it is"


def test_a_pass_sees_true_states_and_then_guesses() -> None:
    """Against one query at a time, with the keys that it should see in a row."""
    rng = np.random.default_rng(0)
    length, heads, kv_heads, dim, passes = 5, 4, 2, 6, 3
    made = [
        [rng.standard_normal((length, n, dim)).astype(np.float32) for n in (heads, kv_heads, kv_heads)]
        for _ in range(passes)
    ]
    earlier: list[tuple[jax.Array, jax.Array]] = []
    for i, (q, k, v) in enumerate(made):
        got, kept = _attend(*map(jnp.asarray, (q, k, v)), earlier=earlier)
        earlier.append(kept)
        for pair in range(i, length):
            seen = [(0, at) for at in range(pair - i + 1)] + [(j, pair - i + j) for j in range(1, i + 1)]
            keys, values = (
                np.stack([made[j][part][at] for j, at in seen]).repeat(heads // kv_heads, 1) for part in (1, 2)
            )
            scores = np.einsum("hd,shd->hs", q[pair], keys) * dim**-0.5
            weights = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
            np.testing.assert_allclose(got[pair], np.einsum("hs,shd->hd", weights, values), atol=1e-5)


@pytest.mark.parametrize("tree", [{}, {"speculative_eagle_topk": 2, "speculative_num_steps": 2}], ids=["chain", "tree"])
def test_a_trained_head_is_served(target: Path, trained: Path, tree: dict[str, int]) -> None:
    files = open_eagle(str(trained))
    assert files.vocabulary is not None
    assert len(files.vocabulary) == 128, "100, rounded up to a whole number of 64s"
    drafts = {"speculative_adaptive": False, "num_speculative_tokens": 3, **tree}
    with LLM(target, speculative_model=str(trained), **drafts, **SETTINGS) as llm:
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        (output,) = llm.generate([[CYCLE[0]]], params, use_tqdm=False)
        stats = llm.engine.stats().speculation
    assert output.outputs[0].token_ids == (CYCLE + CYCLE)[1:41]
    assert stats.accepted_by_position[1] > 0
    depth = tree.get("speculative_num_steps", 3)
    assert stats.num_accepted_tokens > 0.7 * stats.num_draft_tokens * depth / 3 > 10
