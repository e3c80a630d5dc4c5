"""Anthropic's messages as Anthropic's SDK uses them, over a socket; errors in its shape, whoever makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import pytest

from tests.server.fake import FakeEngine
from tests.server.test_tools import HERMES, SCHEMA

MODEL = "fake-model"
WEATHER: Any = {"name": "weather", "description": "How it is.", "input_schema": SCHEMA}
TIME: Any = {"name": "time", "input_schema": {"type": "object", "properties": {}}}
HI: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture
def fake() -> FakeEngine:
    return FakeEngine(max_model_len=4096)


@pytest.fixture
def url(serve: Callable[..., str], fake: FakeEngine) -> str:
    return serve(fake, reasoning_parser="qwen3", api_key=("key",))


@pytest.fixture
def sdk(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="key", max_retries=0, timeout=10) as client:
        yield client


def put_to_the_model(fake: FakeEngine) -> str:
    """The newest prompt."""
    return fake.tokenizer.decode(fake.submitted[-1]["ids"])


def test_a_plain_message(sdk: anthropic.Anthropic, fake: FakeEngine) -> None:
    fake.says = "A river."
    message = sdk.messages.create(
        model=MODEL,
        max_tokens=50,
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        messages=HI,
        extra_body={"temperature": 0.5, "top_k": 3},  # newer versions of the SDK have no names for them
    )
    assert (message.role, message.stop_reason, message.content[0].text) == ("assistant", "end_turn", "A river.")  # type: ignore[union-attr]
    prompt = "<system>Be brief.</><user>hi</><assistant>"
    assert put_to_the_model(fake) == prompt
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (len(prompt) - 16, 16, 8)
    params = fake.submitted[-1]["params"]
    assert (params.temperature, params.top_k, params.max_tokens) == (0.5, 3, 50)

    counted = sdk.messages.count_tokens(model=MODEL, system="Be brief.", messages=HI)
    assert counted.input_tokens == len(prompt)


def test_why_a_message_ends(sdk: anthropic.Anthropic, fake: FakeEngine) -> None:
    short = sdk.messages.create(model=MODEL, max_tokens=3, messages=HI)
    assert short.stop_reason == "max_tokens"
    stopped = sdk.messages.create(model=MODEL, max_tokens=90, messages=HI, stop_sequences=["wör", "!"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "wör")
    assert stopped.content[0].text == "Hello "  # type: ignore[union-attr]


def test_a_stream_holds_thoughts_text_and_calls_as_the_plain_message_does(
    sdk: anthropic.Anthropic, fake: FakeEngine
) -> None:
    fake.says = "<think>\nHm.\n</think>\n\n" + HERMES
    asked: Any = {"model": MODEL, "max_tokens": 999, "messages": HI, "tools": [WEATHER, TIME]}
    plain = sdk.messages.create(**asked, thinking={"type": "enabled", "budget_tokens": 1024})
    assert [part.type for part in plain.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert plain.content[0].thinking == "Hm."  # type: ignore[union-attr]
    assert plain.content[2].input == {"city": "Oslø 🦙"}  # type: ignore[union-attr]
    assert plain.stop_reason == "tool_use"

    with sdk.messages.stream(**asked) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_message()
    assert events[0] == "message_start"
    assert events[-2:] == ["message_delta", "message_stop"]
    assert events.count("content_block_start") == events.count("content_block_stop") == 4

    def shown(message: Any) -> Any:
        return [part.model_dump(exclude={"id"}) for part in message.content], message.stop_reason

    assert shown(final) == shown(plain)
    assert final.usage.output_tokens == plain.usage.output_tokens

    hidden = sdk.messages.create(**asked, thinking={"type": "disabled"})
    assert [part.type for part in hidden.content] == ["text", "tool_use", "tool_use"]

    result = {"type": "tool_result", "tool_use_id": plain.content[2].id, "content": "rain", "is_error": True}  # type: ignore[union-attr]
    asked["messages"] = [*HI, {"role": "assistant", "content": plain.content}, {"role": "user", "content": [result]}]
    sdk.messages.create(**asked)
    assert put_to_the_model(fake).endswith("<tool>Error: rain</><assistant>")


def test_forced_calls_schemas_and_beginnings(sdk: anthropic.Anthropic, fake: FakeEngine) -> None:
    fake.says = '{"city": "Oslo"}'
    asked: Any = {"model": MODEL, "max_tokens": 99, "messages": HI}
    choice: Any = {"type": "tool", "name": "weather"}
    forced = sdk.messages.create(**asked, tools=[WEATHER], tool_choice=choice)
    assert forced.content[0].input == {"city": "Oslo"}  # type: ignore[union-attr]
    form: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    sdk.messages.create(**asked, output_config=form)
    assert fake.submitted[-1]["params"].structured_outputs.json == SCHEMA
    asked["messages"] = [*HI, {"role": "assistant", "content": "It is"}]
    sdk.messages.create(**asked)
    assert put_to_the_model(fake) == "<user>hi</><assistant>It is"


def test_errors_have_anthropics_shape(sdk: anthropic.Anthropic, url: str, fake: FakeEngine) -> None:
    with pytest.raises(anthropic.BadRequestError, match="greater than") as refused:
        sdk.messages.create(model=MODEL, max_tokens=0, messages=HI)
    body: Any = refused.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        sdk.messages.create(model="other", max_tokens=1, messages=HI)
    with pytest.raises(anthropic.AuthenticationError):
        sdk.with_options(api_key="wrong").messages.create(model=MODEL, max_tokens=1, messages=HI)
    wrong: Any = [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]
    with pytest.raises(anthropic.BadRequestError, match="tool_result is for the role user"):
        sdk.messages.create(model=MODEL, max_tokens=1, messages=wrong)
    image: Any = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
    with pytest.raises(anthropic.BadRequestError, match="'image'"):
        sdk.messages.create(model=MODEL, max_tokens=1, messages=image)
    fake.fails_at = 2
    with pytest.raises(anthropic.APIStatusError, match="failed to generate"):
        list(sdk.messages.create(model=MODEL, max_tokens=9, messages=HI, stream=True))
    with pytest.raises(anthropic.InternalServerError):
        sdk.messages.create(model=MODEL, max_tokens=9, messages=HI)
    wrong_method = httpx.get(url + "/v1/messages", headers={"x-api-key": "key"})
    assert wrong_method.json()["error"]["type"] == "invalid_request_error"
    assert httpx.get(url + "/v1/models", headers={"x-api-key": "wrong"}).json()["error"]["code"] == 401


@pytest.mark.anyio
async def test_thinking_needs_a_parser(client: httpx.AsyncClient) -> None:
    body = {"max_tokens": 9, "messages": HI, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    response = await client.post("/v1/messages", json=body)
    assert response.status_code == 400
    assert "--reasoning-parser" in response.json()["error"]["message"]
    body["thinking"] = {"type": "adaptive", "budget_tokens": 1024}
    response = await client.post("/v1/messages", json=body)
    assert response.headers["x-jaxserve-ignored"] == "thinking.budget_tokens"
