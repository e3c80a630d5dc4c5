"""What is read of prompts: the log probabilities of their tokens and their hidden states, however they are served."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from jaxserve.engine import Engine
from jaxserve.engine.output import OutputProcessor
from jaxserve.outputs import RequestOutput
from jaxserve.request import FinishReason, Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.speculative import NgramProposer
from tests.engine.tiny import TOKENIZER
from tests.equivalence.harness import CONTEXT, MODEL, build, params
from tests.models.dense import all_logits, hidden_states

RNG = random.Random(7)
SHARED = [RNG.randrange(MODEL.vocab_size) for _ in range(24)]
PROMPTS = [
    SHARED[: RNG.randrange(25)] + [RNG.randrange(MODEL.vocab_size) for _ in range(RNG.randrange(1, 40))]
    for _ in range(14)
]


def serve(engine: Engine, requests: list[Request]) -> dict[str, RequestOutput]:
    """Finished outputs by request; nothing may be left."""
    output = OutputProcessor(TOKENIZER)
    for request in requests:
        output.add(request.id, None, [request], stream=False)
    engine.add(requests)
    finished: dict[str, RequestOutput] = {}
    while engine.has_work:
        outputs, ended = output.process(engine.step())
        for request_id in ended:
            engine.finish(request_id, FinishReason.STOP)
        finished |= {out.request_id: out for out in outputs}
    assert engine.stats().num_free_blocks == engine.stats().num_blocks, "blocks are leaked"
    return finished


def ask(name: str, prompt: list[int], pooling: str = "", max_tokens: int = 1, **more: Any) -> Request:
    wanted = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **more)
    return Request(name, prompt, wanted, 1, frozenset(), min(CONTEXT, len(prompt) + max_tokens), pooling=pooling)


def expected_logprobs(prompt: list[int]) -> NDArray[np.float64]:
    logits = all_logits(params(), MODEL, prompt).astype(np.float64)
    top = logits.max(-1, keepdims=True)
    logprobs: NDArray[np.float64] = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    return logprobs


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_tokens": 7, "overlap": False},
        {"num_blocks": 30, "max_rows": 3},  # preempts
        {"proposer": NgramProposer(3, 3, 1)},
    ],
    ids=["plainly", "in small chunks", "preempted", "with drafts"],
)
def test_reading_prompts_beside_generating(settings: dict[str, Any]) -> None:
    engine = build(**settings)
    generating = [ask(f"g{i}", prompt, max_tokens=12) for i, prompt in enumerate(PROMPTS)]
    alone = {name: out.outputs[0].token_ids for name, out in serve(build(), generating).items()}
    scored = [ask(f"s{i}", prompt, prompt_logprobs=3, max_tokens=6) for i, prompt in enumerate(PROMPTS)]
    pooled = [ask(f"{way}{i}", p, way) for way in ("mean", "last") for i, p in enumerate(PROMPTS)]
    mixed = [ask(f"g{i}", prompt, max_tokens=12) for i, prompt in enumerate(PROMPTS)] + scored + pooled
    random.Random(3).shuffle(mixed)
    found = serve(engine, mixed)
    if "num_blocks" in settings:
        assert engine.stats().preemptions_total > 0
    for i, prompt in enumerate(PROMPTS):
        assert found[f"g{i}"].outputs[0].token_ids == alone[f"g{i}"], "reading disturbs others"
        assert found[f"s{i}"].outputs[0].token_ids == alone[f"g{i}"][:6]
        assert found[f"s{i}"].num_cached_tokens == 0
        shown = found[f"s{i}"].prompt_logprobs
        assert shown is not None
        assert shown[0] is None
        assert len(shown) == len(prompt)
        expected = expected_logprobs(prompt)
        for position in range(1, len(prompt)):
            row, entries = expected[position - 1], shown[position]
            assert entries is not None
            token = prompt[position]
            assert entries[token].logprob == pytest.approx(row[token], abs=1e-4)
            assert entries[token].rank == 1 + (row > row[token] + 1e-6).sum()
            best = sorted(entries.values(), key=lambda entry: -entry.logprob)[:3]
            assert [entry.logprob for entry in best] == pytest.approx(np.sort(row)[::-1][:3], abs=1e-4)
        states = hidden_states(params(), MODEL, prompt).astype(np.float64)
        for way, wanted in (("mean", states.mean(0)), ("last", states[-1])):
            embedding = found[f"{way}{i}"].embedding
            assert embedding is not None
            assert embedding.dtype == np.float32
            np.testing.assert_allclose(embedding, wanted, atol=2e-5)


def test_a_prompt_that_is_cached_is_read_all_the_same_and_can_be_shared() -> None:
    engine = build()
    first = serve(engine, [ask("a", PROMPTS[0], prompt_logprobs=0), ask("b", PROMPTS[0], "mean")])
    again = serve(engine, [ask("a", PROMPTS[0], prompt_logprobs=0), ask("b", PROMPTS[0], "mean"), ask("c", PROMPTS[0])])
    assert again["a"].prompt_logprobs == first["a"].prompt_logprobs
    assert np.array_equal(again["b"].embedding, first["b"].embedding)  # type: ignore[arg-type]
    assert again["c"].num_cached_tokens > 0
    assert engine.stats().runtime_compiles_total == 0
