"""What /v1/chat/completions answers, and which prompt a conversation becomes."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from jaxserve.config import ServerConfig
from jaxserve.server import create_app
from tests.server.fake import FakeEngine

pytestmark = pytest.mark.anyio

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}


async def post(client: httpx.AsyncClient, *messages: Any, **body: Any) -> dict[str, Any]:
    response = await client.post(PATH, json={"messages": messages or [USER], **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def prompt_of(client: httpx.AsyncClient, engine: FakeEngine, *messages: Any, **body: Any) -> str:
    await post(client, *messages, max_tokens=1, **body)
    return bytes(engine.submitted[-1]["ids"]).decode()


async def refusal(client: httpx.AsyncClient, *messages: Any, **body: Any) -> dict[str, Any]:
    response = await client.post(PATH, json={"messages": messages, **body})
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


async def test_plain_answer_has_openai_shape(client: httpx.AsyncClient) -> None:
    answer = await post(client, max_tokens=5)
    assert answer.pop("id").startswith("chatcmpl-")
    assert answer.pop("created") > 0
    assert answer == {
        "object": "chat.completion",
        "model": "fake-model",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 22,
            "completion_tokens": 5,
            "total_tokens": 27,
            "prompt_tokens_details": {"cached_tokens": 16},
        },
    }


async def test_stream_opens_each_choice_with_its_role(client: httpx.AsyncClient) -> None:
    response = await client.post(PATH, json={"messages": [USER], "stream": True, "n": 2, "max_tokens": 6})
    *lines, last = response.text.strip().split("\n\n")
    assert last == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    for index, text in enumerate(["Hello ", "wörld"]):
        choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in choices[1:])
        assert "".join(choice["delta"].get("content", "") for choice in choices) == text
        assert [choice["finish_reason"] for choice in choices].index("length") == len(choices) - 1


async def test_answer_may_fill_the_context(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    assert (await post(client))["usage"]["total_tokens"] == engine.max_model_len
    assert engine.submitted[0]["params"].max_tokens is None


async def test_max_completion_tokens(client: httpx.AsyncClient) -> None:
    assert (await post(client, max_completion_tokens=3))["usage"]["completion_tokens"] == 3
    assert (await post(client, max_completion_tokens=3, max_tokens=3))["usage"]["completion_tokens"] == 3
    assert (await refusal(client, USER, max_completion_tokens=3, max_tokens=4))["param"] == "max_tokens"


@pytest.mark.parametrize(("top", "num"), [(None, 0), (0, 0), (1, 1), (3, 3)])
async def test_logprobs_shape(client: httpx.AsyncClient, top: int | None, num: int) -> None:
    answer = await post(client, max_tokens=8, logprobs=True, top_logprobs=top)
    content = answer["choices"][0]["logprobs"]["content"]
    assert [(entry["token"], entry["bytes"], entry["logprob"]) for entry in content[:1]] == [("H", [72], -1.0)]
    assert content[7]["bytes"] == [0xC3]
    assert all(len(entry["top_logprobs"]) == num for entry in content)
    if num:
        assert content[0]["top_logprobs"][0] == {"token": "<eos>", "logprob": -0.5, "bytes": list(b"<eos>")}


async def test_logprobs_off(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    assert (await post(client, logprobs=False, max_tokens=1))["choices"][0]["logprobs"] is None
    assert engine.submitted[0]["params"].logprobs is None
    assert (await refusal(client, USER, top_logprobs=2))["param"] == "top_logprobs"
    assert (await refusal(client, USER, logprobs=True, top_logprobs=21))["param"] == "top_logprobs"


async def test_prompt_is_the_template_s_own_ids(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    assert await prompt_of(client, engine, USER) == "<user>hi</><assistant>"
    assert await prompt_of(client, engine, USER, add_generation_prompt=False) == "<user>hi</>"
    assert await prompt_of(client, engine, USER, chat_template_kwargs={"think": 1}) == "<user>hi</>[think=1]<assistant>"
    begun = {"role": "assistant", "content": "So"}
    assert await prompt_of(client, engine, USER, begun, continue_final_message=True) == "<user>hi</><assistant>So"


async def test_what_clients_add_to_answers_they_send_back_is_no_part_of_the_prompt(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    added = {**call, "index": 0, "function": {**call["function"], "parsed_arguments": {"x": 1}}}  # type: ignore[dict-item]
    user = {"role": "user", "content": "x"}
    for messages in (
        [user, {"role": "assistant", "content": None, "tool_calls": [call]}],
        [user, {"role": "assistant", "content": None, "tool_calls": [added], "parsed": {"a": 1}, "annotations": []}],
    ):
        assert (await client.post(PATH, json={"messages": messages, "max_tokens": 1})).status_code == 200
    assert engine.submitted[0]["ids"] == engine.submitted[1]["ids"]


async def test_content_parts_and_roles(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "rule"}, {"role": "user", "content": parts}]
    assert await prompt_of(client, engine, *messages) == "<system>rule</><user>a\nb</><assistant>"


@pytest.mark.parametrize("content", [{"content": None}, {}])
async def test_tool_call_without_content_is_kept(
    client: httpx.AsyncClient, engine: FakeEngine, content: dict[str, None]
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    asked = {"role": "assistant", **content, "tool_calls": [call], "refusal": None, "audio": None}
    result = {"role": "tool", "tool_call_id": "c1", "content": "2"}
    prompt = await prompt_of(client, engine, USER, asked, result)
    parsed = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert prompt == f"<user>hi</><assistant>{[parsed]}</><tool>2</><assistant>"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (["hi"], "messages.0"),
        ([{"role": "robot", "content": "x"}], "messages.0.role"),
        ([{"content": "x"}], "messages.0.role"),
        ([{"role": "user", "content": None}], "messages.0.content"),
        ([USER, {"role": "user", "content": 5}], "messages.1.content"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages.0.content.0.type",
        ),
        ([{"role": "user", "content": "x", "contents": "y"}], "messages.0.contents"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "messages.0.tool_calls.0.function.arguments",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 10000}}]}],
            "messages.0.tool_calls.0.function.arguments",
        ),
    ],
)
async def test_bad_messages_are_refused_by_name(client: httpx.AsyncClient, messages: list[Any], param: str) -> None:
    assert (await refusal(client, *messages))["param"] == param


async def test_a_conversation_beyond_the_context_is_refused_by_the_name_it_has_here(client: httpx.AsyncClient) -> None:
    error = await refusal(client, {"role": "user", "content": "x" * 600})
    assert error["param"] == "messages"
    assert "context" in error["message"]


async def test_template_refusals(client: httpx.AsyncClient) -> None:
    error = await refusal(client, USER, chat_template_kwargs={"refuse": True})
    assert "template refuses" in error["message"]
    error = await refusal(client, USER, chat_template_kwargs={"chat_template": "{{ x }}"})
    assert error["param"] == "chat_template_kwargs.chat_template"
    error = await refusal(client, USER, add_generation_prompt=True, continue_final_message=True)
    assert error["param"] == "add_generation_prompt"


async def test_a_template_of_the_request_s_own(engine: FakeEngine) -> None:
    app = create_app(engine, ServerConfig(trust_request_chat_template=True))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        assert (await prompt_of(client, engine, USER, chat_template="{{ x }}")).startswith("{{ x }}<user>")
