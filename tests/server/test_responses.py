"""The responses API as OpenAI's SDK uses it, over a socket; and what the SDK would never send, in process."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pydantic
import pytest

from jaxserve.config import ServerConfig
from jaxserve.server import create_app
from jaxserve.server.exchange import _Spaces
from jaxserve.server.parsers import Event
from jaxserve.server.responses.items import as_messages
from jaxserve.server.responses.schema import ResponsesRequest
from jaxserve.server.responses.store import Kept, Run, Store
from jaxserve.server.responses.writer import Writer
from tests.server.fake import FakeEngine
from tests.server.test_errors import error_of
from tests.server.test_tools import HERMES, SCHEMA

PATH = "/v1/responses"
WEATHER: dict[str, Any] = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}
TIME: dict[str, Any] = {"type": "function", "name": "time", "parameters": None, "strict": False}
THOUGHT = "<think>\nHm, 🦙.\n</think>\n\n" + HERMES


@pytest.fixture
def fake() -> FakeEngine:
    return FakeEngine(max_model_len=4096)


@pytest.fixture
def sdk(serve: Callable[..., str], fake: FakeEngine) -> Iterator[openai.OpenAI]:
    url = serve(fake, reasoning_parser="qwen3", max_stored_responses=3)
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=10) as client:
        yield client


def put_to_the_model(fake: FakeEngine) -> str:
    """The newest prompt."""
    return fake.tokenizer.decode(fake.submitted[-1]["ids"])


def test_a_plain_answer_is_kept_and_gone_on_from(sdk: openai.OpenAI, fake: FakeEngine) -> None:
    fake.says = " A river."
    first = sdk.responses.create(input="Name one.", instructions="Be brief.", metadata={"k": "v"})
    assert (first.status, first.output_text, first.metadata) == ("completed", " A river.", {"k": "v"})
    assert first.usage is not None
    assert first.usage.output_tokens == len(" A river.")
    assert first.usage.input_tokens_details.cached_tokens == 16
    assert put_to_the_model(fake) == "<system>Be brief.</><user>Name one.</><assistant>"

    second = sdk.responses.create(input="And?", previous_response_id=first.id)
    assert put_to_the_model(fake) == "<user>Name one.</><assistant> A river.</><user>And?</><assistant>"
    assert sdk.responses.retrieve(second.id) == second
    assert second.previous_response_id == first.id
    listed = sdk.responses.input_items.list(second.id).data
    assert [item.content[0].text for item in listed] == ["And?"]  # type: ignore[union-attr]

    sdk.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="there is no response"):
        sdk.responses.create(input="x", previous_response_id=first.id)
    unkept = sdk.responses.create(input="x", store=False)
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(unkept.id)


def test_a_stream_tells_of_thoughts_text_and_calls_what_the_plain_answer_holds(
    sdk: openai.OpenAI, fake: FakeEngine
) -> None:
    fake.says = THOUGHT
    plain = sdk.responses.create(input="hi", tools=[WEATHER, TIME])  # type: ignore[list-item]
    assert [item.type for item in plain.output] == ["reasoning", "message", "function_call", "function_call"]
    assert plain.output[0].content[0].text == "Hm, 🦙."  # type: ignore[union-attr,index]
    assert plain.output_text == "Let me see."
    call = plain.output[2]
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Oslø 🦙"})
    assert plain.usage is not None
    assert plain.usage.output_tokens_details.reasoning_tokens == len("Hm, 🦙.".encode())

    with sdk.responses.stream(model="fake-model", input="hi", tools=[WEATHER, TIME]) as stream:  # type: ignore[list-item]
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds[:5] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
    ]
    assert kinds[-3:] == ["response.function_call_arguments.done", "response.output_item.done", "response.completed"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    steps = [kind for i, kind in enumerate(kinds) if not i or kind != kinds[i - 1]]
    text_steps = ["output_text.delta", "output_text.done", "content_part.done", "output_item.done"]
    found = steps.index("response.output_text.delta")
    assert steps[found : found + 4] == [f"response.{step}" for step in text_steps]

    def shown(items: Any) -> Any:
        return [item.model_dump(exclude={"id", "call_id", "parsed_arguments"}) for item in items]

    assert shown(sdk.responses.retrieve(final.id).output) == shown(plain.output)
    assert [item.type for item in final.output] == [item.type for item in plain.output]

    # What came out goes back in, with what the call gave.
    answered = [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
    sdk.responses.create(input=[*plain.output, *answered], tools=[WEATHER])  # type: ignore[list-item]
    prompt = put_to_the_model(fake)
    assert f"{{'id': '{call.call_id}'" in prompt
    assert prompt.endswith("<tool>rain</><assistant>")


class Answer(pydantic.BaseModel):
    city: str


def test_parse_and_forced_calls(sdk: openai.OpenAI, fake: FakeEngine) -> None:
    fake.says = '{"city": "Oslo"}'
    parsed = sdk.responses.parse(input="Where?", text_format=Answer)
    assert parsed.output_parsed == Answer(city="Oslo")
    wanted = fake.submitted[-1]["params"].structured_outputs
    assert wanted.json["required"] == ["city"]

    forced: Any = {"type": "function", "name": "weather"}
    response = sdk.responses.create(input="x", tools=[WEATHER], tool_choice=forced)  # type: ignore[list-item]
    (call,) = response.output
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Oslo"})


def test_the_limit_of_tokens_leaves_a_response_incomplete(sdk: openai.OpenAI, fake: FakeEngine) -> None:
    response = sdk.responses.create(input="x", max_output_tokens=3)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"  # type: ignore[union-attr]
    fake.says = HERMES
    cut = sdk.responses.create(input="x", max_output_tokens=70, tools=[WEATHER])  # type: ignore[list-item]
    assert [(item.type, item.status) for item in cut.output][1:] == [("function_call", "incomplete")]  # type: ignore[union-attr]
    sdk.responses.create(input="And?", previous_response_id=cut.id)
    assert put_to_the_model(fake) == "<user>x</><assistant>Let me see.</><user>And?</><assistant>"
    fake.says = None
    events = list(sdk.responses.create(input="x", max_output_tokens=3, stream=True))
    assert events[-1].type == "response.incomplete"


def test_logprobs_come_with_the_text_alone(sdk: openai.OpenAI, fake: FakeEngine) -> None:
    fake.says = "<think>a</think>bcd"
    include: Any = ["message.output_text.logprobs"]
    response = sdk.responses.create(input="x", include=include, top_logprobs=2)
    part = response.output[1].content[0]  # type: ignore[union-attr,index]
    assert [entry.token for entry in part.logprobs] == ["b", "c", "d"]  # type: ignore[union-attr]
    assert len(part.logprobs[0].top_logprobs) == 2  # type: ignore[union-attr,index]
    deltas = [e for e in sdk.responses.create(input="x", include=include, stream=True) if "text.delta" in e.type]
    assert [e.logprobs[0].token for e in deltas if e.type == "response.output_text.delta"] == ["b", "c", "d"]


def test_background_responses_are_polled_followed_and_cancelled(sdk: openai.OpenAI, fake: FakeEngine) -> None:
    fake.seconds_per_token = 0.002
    queued = sdk.responses.create(input="x", background=True, max_output_tokens=5)
    assert queued.status == "queued"
    deadline = time.monotonic() + 5
    while (now := sdk.responses.retrieve(queued.id)).status != "incomplete" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert now.output_text == "Hello"
    assert sdk.responses.cancel(queued.id) == now  # it has ended, and stays what it is

    followed = sdk.responses.create(input="x", background=True, stream=True, max_output_tokens=5)
    event = next(iter(followed))
    assert event.type == "response.created"
    assert event.response.status == "queued"
    followed.close()  # the work goes on
    events = list(sdk.responses.retrieve(event.response.id, stream=True, starting_after=0))
    assert [event.type for event in events[:2]] == ["response.queued", "response.in_progress"]
    assert [event.sequence_number for event in events] == list(range(1, len(events) + 1))
    assert events[-1].type == "response.incomplete"
    with sdk.responses.stream(model="fake-model", input="x", background=True, max_output_tokens=5) as stream:
        assert "".join(event.delta for event in stream if event.type == "response.output_text.delta") == "Hello"

    fake.seconds_per_token = 0.2
    running = sdk.responses.create(input="x", background=True)
    assert sdk.responses.cancel(running.id).status == "cancelled"
    assert sdk.responses.retrieve(running.id).status == "cancelled"
    assert not fake.running
    with pytest.raises(openai.BadRequestError, match="background"):
        sdk.responses.cancel(sdk.responses.create(input="x", max_output_tokens=1).id)


def test_a_failure_on_the_way_is_told(sdk: openai.OpenAI, fake: FakeEngine) -> None:
    fake.fails_at = 3
    events = list(sdk.responses.create(input="x", stream=True))
    last = events[-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert last.response.error.code == "server_error"
    assert last.response.output_text == "Hel"
    fake.fails_at = 0
    with pytest.raises(openai.InternalServerError):
        sdk.responses.create(input="x", stream=True)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("body", "param", "part"),
    [
        ({}, "input", "required"),
        ({"input": []}, "input", "at least 1"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0", "item_reference"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.message.content.0", "image"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "["}]}, None, "JSON object"),
        ({"input": "x", "max_tokens": 5}, "max_tokens", "max_output_tokens"),
        ({"input": "x", "max_tokens": 0}, "max_tokens", "max_output_tokens"),
        ({"input": "x", "prompt_logprobs": 0}, "prompt_logprobs", "not supported"),
        ({"input": "x", "n": 2}, "n", "one answer"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens", "greater than"),
        ({"input": "x" * 600}, "input", "512"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format", "schema"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools.0", "function"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice", "tools"),
        ({"input": "x", "background": True, "store": False}, "background", "store"),
        ({"input": "x", "truncation": "auto"}, "truncation", "not supported"),
        ({"input": "x", "top_logprobs": 2}, "top_logprobs", "include"),
        ({"input": "x", "temperature": -1}, "temperature", "temperature"),
        ({"input": "x", "reasoning": {"effort": "high"}}, "reasoning.effort", "None"),
    ],
)
async def test_what_cannot_be_served_is_refused(
    client: httpx.AsyncClient, body: dict[str, Any], param: str | None, part: str
) -> None:
    for more in ({}, {"stream": True}):
        response = await client.post(PATH, json={**body, **more})
        error = response.json()["error"]
        assert response.status_code == 400, response.text
        assert part in error["message"]
        assert param is None or error["param"] == param


@pytest.mark.anyio
async def test_other_sampling_parameters_keep_their_names(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = {"input": "x", "top_k": 3, "stop": "w", "seed": 5, "cache_salt": "s", "what": 1, "max_output_tokens": 50}
    response = await client.post(PATH, json=body)
    assert response.headers["x-jaxserve-ignored"] == "what"
    assert response.json()["output"][0]["content"][0]["text"] == "Hello "
    sent = engine.submitted[-1]
    assert (sent["params"].top_k, sent["params"].seed, sent["cache_salt"]) == (3, 5, "s")


def test_items_of_an_assistant_become_one_message() -> None:
    items = ResponsesRequest.parse(
        {
            "input": [
                {"role": "user", "content": "q"},
                {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
                {"role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call", "call_id": "d", "name": "g", "arguments": ""},
                {"role": "assistant", "content": "b"},
            ]
        }
    ).input
    user, first, second = as_messages(items)
    assert user == {"role": "user", "content": "q"}
    assert (first["reasoning_content"], first["content"]) == ("t", "a")
    assert [call["id"] for call in first["tool_calls"]] == ["c", "d"]
    assert second == {"role": "assistant", "content": "b"}


def test_the_store_forgets_what_was_not_used_for_longest() -> None:
    def kept(name: str, status: str = "completed") -> Kept:
        return Kept({"id": name, "status": status}, [])

    store = Store(2)
    for name in ("a", "b"):
        store.put(kept(name))
    store.get("a")
    store.put(kept("c"))
    assert store.get("a")
    with pytest.raises(Exception, match="no response 'b'"):
        store.get("b")
    for name in ("d", "e"):
        store.put(kept(name, "queued"))
    with pytest.raises(Exception, match="in the background"):
        store.put(kept("f", "queued"))
    followed = Kept({"id": "g", "status": "completed"}, [], run=Run(), streams=True)
    empty = followed.measure()
    assert followed.run is not None
    followed.run.told += [{"type": "x"}] * 10
    assert followed.measure() >= empty + 10 * 1024
    small = Store(9, most_bytes=100)
    for name in "abcdefgh":
        small.put(kept(name))
    assert 1 <= sum(name in small._kept for name in "abcdefgh") < 4


def test_an_event_that_is_kept_does_not_grow_with_its_part() -> None:
    writer = Writer(ResponsesRequest.parse({"input": "x"}), "resp_1", "m")
    told = list(
        writer.write([Event("content", "a")], [{"token": "a", "logprob": 0.0, "bytes": [97], "top_logprobs": []}])
    )
    (added,) = (event for event in told if event["type"] == "response.content_part.added")
    assert added["part"]["logprobs"] == []
    assert writer.response["output"][0]["content"][0]["logprobs"]


def test_whitespace_between_parts_is_nobodys() -> None:
    spaces = _Spaces()
    events = [
        Event("content", " \n"),
        Event("name", "f"),
        Event("content", "\n"),
        Event("content", " x"),
        Event("content", " "),
    ]
    settled = [(e.kind, e.text) for e in spaces.settle(events, last=True)]
    assert settled == [("name", "f"), ("content", "\n x"), ("content", " ")]
    assert [e.text for e in _Spaces().settle([Event("content", "\n")], last=True)] == ["\n"]


@pytest.mark.anyio
async def test_without_a_store_there_is_no_background() -> None:
    app = create_app(FakeEngine(), ServerConfig(max_stored_responses=0))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        response = await client.post(PATH, json={"input": "x", "background": True})
        assert error_of(response)["message"] == "background needs a server that stores responses."
        for stored in (None, True, False):
            answer = (await client.post(PATH, json={"input": "x", "store": stored, "max_output_tokens": 1})).json()
            assert answer["store"] is False
            assert (await client.get(f"{PATH}/{answer['id']}")).status_code == 404
        assert (await client.post(PATH, json={"input": "x", "max_output_tokens": 2})).status_code == 200
