"""Structured outputs from a request to the constraint, on real tokenizers and on the engine's thread."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest

from jaxserve.errors import RequestError
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams, StructuredOutputsParams
from jaxserve.structured import step_mask
from tests.engine.test_async_engine import collect, running
from tests.engine.test_input import processor
from tests.tokenizer.samples import sentencepiece, smollm2

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 3, "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["a", "日本", "x y", None]}, "minItems": 1, "maxItems": 3},
        "size": {"type": "number", "minimum": 0, "maximum": 1},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}


def sampled(request: Request, tokenizer: Any, vocab: int, rng: random.Random) -> str:
    """A random output, up to the token that ends it."""
    output: list[int] = []
    while len(output) < 300:
        mask = step_mask([(request.constraint, 0, request.drafts)], vocab)
        assert mask is not None
        legal = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        token = int(rng.choice(legal))
        if token in request.stop_ids:
            text: str = tokenizer.decode(output)
            return text
        output.append(token)
        request.constraint.advance((token,))
    raise AssertionError("the output has no end")


def test_random_outputs_of_a_real_vocabulary_satisfy_the_schema() -> None:
    tokenizer, _ = smollm2()
    inputs = processor(tokenizer=tokenizer, vocab=tokenizer.vocab_size + 7, eos=(2, 0))
    wanted = SamplingParams(structured_outputs=StructuredOutputsParams(json=SCHEMA), n=2)
    texts = set()
    for seed in range(5):
        for request in inputs.prepare("r", "x", wanted):
            texts.add(sampled(request, tokenizer, tokenizer.vocab_size + 7, random.Random(seed)))
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(texts) > 3


def test_sentencepiece_writes_no_space_that_the_grammar_does_not_know() -> None:
    tokenizer, _ = sentencepiece()
    inputs = processor(tokenizer=tokenizer, vocab=tokenizer.vocab_size)
    wanted = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["hello world", "日本"]))
    texts = {
        sampled(inputs.prepare("r", "x", wanted)[0], tokenizer, tokenizer.vocab_size, random.Random(seed))
        for seed in range(8)
    }
    assert texts == {"hello world", "日本"}


def test_a_model_s_every_end_token_ends_and_no_end_is_ignored() -> None:
    inputs = processor(eos=(1, 2))
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="A?"), ignore_eos=True)
    (request,) = inputs.prepare("r", "x", params)
    assert {1, 2} <= request.stop_ids
    with pytest.raises(RequestError, match="cannot be used"):
        inputs.prepare("r", "x", SamplingParams(structured_outputs=StructuredOutputsParams(json={"type": "nope"})))


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_on_the_engine_s_thread(anyio_backend: str) -> None:
    wanted = StructuredOutputsParams(regex="[0-9]{3}-[A-F]{2,4}")
    async with running() as llm:
        for seed in range(3):
            params = SamplingParams(structured_outputs=wanted, seed=seed, max_tokens=20, stop=["-ABCD"])
            tokens, reason = await collect(llm, [4, 5, 6], f"r{seed}", params)
            assert reason == "stop"
            assert re.fullmatch("[0-9]{3}-[A-F]{2,4}", llm.tokenizer.decode(tokens))
        bad = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[a-"))
        with pytest.raises(RequestError, match="regular expression is invalid"):
            await collect(llm, [4, 5, 6], "bad", bad)
        assert llm.stats().num_running == llm.stats().num_waiting == 0
