"""The APIs of others over a live server with the real model, as their SDKs use them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest

QUESTION = "What is the capital of France? Answer in one word."
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture
def sdk(server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_responses(sdk: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "smollm2-135m", "temperature": 0.0, "max_output_tokens": 24}
    first = sdk.responses.create(input=QUESTION, **asked)
    assert "Paris" in first.output_text
    with sdk.responses.stream(input=QUESTION, **asked) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == first.output_text
    more = sdk.responses.create(input="And of Norway?", previous_response_id=first.id, **asked)
    assert more.usage is not None
    assert first.usage is not None
    assert more.usage.input_tokens > first.usage.input_tokens
    assert more.usage.input_tokens_details.cached_tokens > 0
    form: Any = {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}}
    formed = sdk.responses.create(input=QUESTION, text=form, **asked)
    assert json.loads(formed.output_text).keys() == {"city"}
    tool: Any = {"type": "function", "name": "look_up", "parameters": SCHEMA, "strict": True}
    (call,) = sdk.responses.create(
        input=QUESTION, tools=[tool], tool_choice="required", parallel_tool_calls=False, **asked
    ).output
    assert call.type == "function_call"
    assert json.loads(call.arguments).keys() == {"city"}


def test_messages(server: str) -> None:
    messages: Any = [{"role": "user", "content": QUESTION}]
    with anthropic.Anthropic(base_url=server, api_key="none", max_retries=0, timeout=60) as sdk:
        counted = sdk.messages.count_tokens(model="smollm2-135m", messages=messages)
        asked: dict[str, Any] = {"model": "smollm2-135m", "messages": messages, "max_tokens": 24}
        message = sdk.messages.create(**asked, extra_body={"temperature": 0})
        with sdk.messages.stream(**asked, extra_body={"temperature": 0}) as stream:
            text = "".join(stream.text_stream)
    assert message.content[0].text == text  # type: ignore[union-attr]
    assert "Paris" in text
    usage = message.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted.input_tokens


def test_vectors_scores_and_echoes(server: str, sdk: openai.OpenAI) -> None:
    vectors = np.array([item.embedding for item in sdk.embeddings.create(model="smollm2-135m", input=["cat"] * 2).data])
    assert np.array_equal(vectors[0], vectors[1])
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1, abs=1e-5)
    documents = ["Oslo is the capital of Norway.", "Bananas are yellow."]
    ranked = httpx.post(server + "/v1/rerank", json={"query": "What is the capital of Norway?", "documents": documents})
    assert ranked.json()["results"][0]["index"] == 0
    scores = httpx.post(
        server + "/v1/score", json={"text_1": "The capital of France is", "text_2": [" Paris.", " Oslo."]}
    )
    true, false = (item["score"] for item in scores.json()["data"])
    assert 0 > true > false
    echoed = sdk.completions.create(model="smollm2-135m", prompt="Roses are red", echo=True, logprobs=1, max_tokens=1)
    logprobs = echoed.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens) == echoed.choices[0].text
    assert httpx.get(server + "/server_info").json()["model"] == "smollm2-135m"
