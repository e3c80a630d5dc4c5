"""Structured outputs and tool calls of the real model, offline and through the openai SDK."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from jaxserve import LLM, SamplingParams, StructuredOutputsParams
from tests.real.test_live_server import client

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "maximum": 120, "minimum": 0},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Oslo, in celsius?"}]


@pytest.fixture
def api(server: str) -> Iterator[openai.OpenAI]:
    with client(server) as api:
        yield api


class Person(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)


def test_offline(llm: LLM) -> None:
    wanted = StructuredOutputsParams(json=SCHEMA)
    params = [SamplingParams(temperature=t, max_tokens=60, seed=3, structured_outputs=wanted) for t in (0.0, 1.0, 1.0)]
    params[2] = SamplingParams(
        temperature=0, max_tokens=10, structured_outputs=StructuredOutputsParams(choice=["no", "yes"])
    )
    prompts = ["A person as JSON: "] * 2 + ["Is the sky blue? Answer: "]
    *people, choice = llm.generate(prompts, params, use_tqdm=False)
    for person in people:
        assert person.outputs[0].finish_reason == "stop"
        jsonschema.validate(json.loads(person.outputs[0].text), SCHEMA)
    assert choice.outputs[0].text in ("no", "yes")


def test_parsed_answers(api: openai.OpenAI) -> None:
    answer = api.chat.completions.parse(
        model="smollm2-135m",
        messages=[{"role": "user", "content": "Tell me of a person called Ada, who is 36."}],
        response_format=Person,
        max_tokens=80,
        temperature=0,
    )
    assert isinstance(answer.choices[0].message.parsed, Person)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_calls_that_must_be_made(api: openai.OpenAI, choice: Any) -> None:
    asked: dict[str, Any] = {
        "model": "smollm2-135m",
        "messages": QUESTION,
        "tools": [WEATHER],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 100,
        "temperature": 0,
    }
    plain = api.chat.completions.create(**asked).choices[0]
    assert plain.finish_reason == "tool_calls"
    assert plain.message.tool_calls is not None
    (call,) = plain.message.tool_calls
    assert isinstance(call, openai.types.chat.ChatCompletionMessageFunctionToolCall)
    jsonschema.validate(json.loads(call.function.arguments), WEATHER["function"]["parameters"])
    with api.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert [made.function.arguments for made in final.message.tool_calls or ()] == [call.function.arguments]
    result = {"role": "tool", "tool_call_id": call.id, "content": "7 degrees, rain"}
    messages = [*QUESTION, plain.message.model_dump(exclude_none=True), result]
    answer = api.chat.completions.create(**{**asked, "messages": messages, "tool_choice": "auto", "max_tokens": 8})
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0


def test_a_bad_schema_is_named_and_the_server_lives(api: openai.OpenAI) -> None:
    for body in ({"guided_regex": "[a-"}, {"structured_outputs": {"json": {"type": "nope"}}}):
        with pytest.raises(openai.BadRequestError) as caught:
            api.completions.create(model="smollm2-135m", prompt="x", extra_body=body)
        assert caught.value.param == next(iter(body))
    assert api.completions.create(model="smollm2-135m", prompt="x", max_tokens=1).choices
