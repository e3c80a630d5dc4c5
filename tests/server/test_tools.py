"""Tool calls, reasoning and forms of the output over HTTP: what is put to the model, and what comes back."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from jaxserve.config import ServerConfig
from jaxserve.sampling_params import StructuredOutputsParams
from jaxserve.server import create_app
from jaxserve.server.parsers import REASONING_PARSERS, TOOL_PARSERS, OutputParser
from tests.server.fake import FakeEngine

pytestmark = pytest.mark.anyio

PATH = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "How it is.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "time"}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}
HERMES = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslø 🦙"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)


@pytest.fixture
async def thinking(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server whose model thinks."""
    app = create_app(engine, ServerConfig(reasoning_parser="qwen3"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        yield client


async def ask(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    """The only choice of a plain answer."""
    response = await client.post(PATH, json={"messages": [{"role": "user", "content": "hi"}], **body})
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


async def deltas(client: httpx.AsyncClient, **body: Any) -> tuple[list[dict[str, Any]], str]:
    """What is in the deltas of a stream, and its finish reason."""
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, **body}
    lines = (await client.post(PATH, json=body)).text.strip().split("\n\n")
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-1]]
    (reason,) = {choice["finish_reason"] for choice in choices} - {None}
    return [choice["delta"] for choice in choices if choice["delta"]], reason


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of deltas, as OpenAI's SDK does."""
    message: dict[str, Any] = {"content": ""}
    for part in parts:
        for name in ("content", "reasoning_content"):
            if name in part:
                message[name] = message.get(name, "") + part[name]
        for call in part.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                assert call.keys() == {"index", "id", "type", "function"}
                calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
            else:
                assert call.keys() == {"index", "function"}
                assert call["function"].keys() == {"arguments"}
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message


async def test_calls_of_a_plain_answer_and_of_a_stream(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.says = HERMES
    choice = await ask(client, tools=TOOLS)
    message = choice["message"]
    assert (message["content"], choice["finish_reason"]) == ("Let me see.", "tool_calls")
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "weather", "arguments": '{"city":"Oslø 🦙"}'},
        {"name": "time", "arguments": "{}"},
    ]
    assert {call["type"] for call in message["tool_calls"]} == {"function"}
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    parts, reason = await deltas(client, tools=TOOLS)
    streamed = joined(parts)
    assert reason == "tool_calls"
    assert streamed["content"] == "Let me see."
    assert [call["function"] for call in streamed["tool_calls"]] == [call["function"] for call in message["tool_calls"]]
    assert parts[0] == {"role": "assistant", "content": ""}
    assert len(parts) > 20


async def test_without_content_it_is_null_and_a_cut_call_is_closed(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.says = HERMES.removeprefix("Let me see.\n")
    choice = await ask(client, tools=TOOLS, max_tokens=60)
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] is None
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"city": "Oslø"}
    choice = await ask(client, tools=TOOLS, stop=["slø"])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", "slø")
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city":"O"}'


async def test_who_may_call_what(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.says = HERMES
    assert len((await ask(client, tools=TOOLS, parallel_tool_calls=False))["message"]["tool_calls"]) == 1
    for body in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = await ask(client, **body)
        assert choice["finish_reason"] == "stop"
        assert choice["message"] == {"role": "assistant", "content": HERMES, "refusal": None}
        assert not bytes(engine.submitted[-1]["ids"]).startswith(b"[{")
    await ask(client, tools=TOOLS)
    assert bytes(engine.submitted[-1]["ids"]).decode().startswith(str(TOOLS))


async def test_every_choice_has_calls_of_its_own(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.says = HERMES
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "n": 2, "logprobs": True}
    answer = (await client.post(PATH, json=body)).json()
    assert [len(choice["message"]["tool_calls"]) for choice in answer["choices"]] == [2, 2]
    lines = (await client.post(PATH, json={**body, "stream": True})).text.strip().split("\n\n")
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-1]]
    for index in (0, 1):
        own = [choice for choice in choices if choice["index"] == index]
        assert len(joined([choice["delta"] for choice in own])["tool_calls"]) == 2
        tokens = [entry for choice in own if choice["logprobs"] for entry in choice["logprobs"]["content"]]
        assert len(tokens) == len(HERMES.encode())


async def test_a_call_that_must_be_made(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.says = '[{"name": "weather", "parameters": {"city": "Oslo"}}, {"name": "time", "parameters": {}}]'
    choice = await ask(client, tools=TOOLS, tool_choice="required")
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather", "time"]
    assert choice["finish_reason"] == "tool_calls"
    grammar = engine.submitted[-1]["params"].structured_outputs.grammar
    assert all(part in grammar for part in ("weather", "time", '"city"'))
    engine.says = '{"city": "Oslo"}'
    choice = await ask(client, tools=TOOLS, tool_choice=NAMED)
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city":"Oslo"}'}
    assert engine.submitted[-1]["params"].structured_outputs == StructuredOutputsParams(json=SCHEMA)
    parts, reason = await deltas(client, tools=TOOLS, tool_choice=NAMED)
    assert reason == "tool_calls"
    assert joined(parts)["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city":"Oslo"}'}


async def test_thoughts(thinking: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.says = f"<think>\nOslo?\n</think>\n\n{HERMES}"
    message = (await ask(thinking, tools=TOOLS))["message"]
    assert message["reasoning_content"] == message["reasoning"] == "Oslo?"
    assert message["content"] == "Let me see."
    assert len(message["tool_calls"]) == 2
    streamed = joined((await deltas(thinking, tools=TOOLS))[0])
    assert streamed["reasoning_content"] == "Oslo?"
    assert streamed["content"] == "Let me see."
    assert "reasoning" not in (await ask(thinking, include_reasoning=False))["message"]
    begun = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<think>\n"}]
    engine.says = "Oslo.</think>yes"
    message = (await ask(thinking, messages=begun, continue_final_message=True))["message"]
    assert (message["reasoning"], message["content"]) == ("Oslo.", "yes")
    engine.says = "no thought"
    assert (await ask(thinking))["message"]["reasoning"] is None
    engine.says = "<think>for long"
    choice = await ask(thinking, max_tokens=10)
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("for", None)
    assert choice["finish_reason"] == "length"


async def test_a_form_begins_after_the_thought(thinking: httpx.AsyncClient, engine: FakeEngine) -> None:
    await ask(thinking, guided_regex="a+", max_tokens=1)
    assert engine.submitted[-1]["params"].structured_outputs.reasoning == ("<think>", "</think>")


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({"response_format": {"type": "json_object"}}, StructuredOutputsParams(json_object=True)),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            StructuredOutputsParams(json=SCHEMA),
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True, "regex": None}},
            StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True),
        ),
        ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutputsParams(choice=("a", "b"))),
        ({"guided_json": json.dumps(SCHEMA)}, StructuredOutputsParams(json=SCHEMA)),
        (
            {"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"},
            StructuredOutputsParams(json=SCHEMA, whitespace_pattern=" ?"),
        ),
        ({"guided_regex": "a+"}, StructuredOutputsParams(regex="a+")),
        ({"guided_choice": ["a"]}, StructuredOutputsParams(choice=("a",))),
        ({"guided_grammar": 'root ::= "a"'}, StructuredOutputsParams(grammar='root ::= "a"')),
        ({"response_format": {"type": "text"}}, None),
    ],
)
async def test_forms(client: httpx.AsyncClient, engine: FakeEngine, body: dict[str, Any], wanted: Any) -> None:
    await ask(client, max_tokens=1, **body)
    response = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, **body})
    assert response.status_code == 200, response.text
    assert [s["params"].structured_outputs for s in engine.submitted] == [wanted, wanted]


async def test_a_template_that_knows_no_tools(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(engine.tokenizer), "chat_template", "{{ messages }}")
    engine.says, engine.max_model_len = HERMES, 2048
    app = create_app(engine, ServerConfig())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        system = {"role": "system", "content": "Be nice."}
        message = (await ask(client, tools=TOOLS, messages=[system, {"role": "user", "content": "hi"}]))["message"]
        assert len(message["tool_calls"]) == 2
        prompt = bytes(engine.submitted[-1]["ids"]).decode()
        assert prompt.startswith("<system>Be nice.\n\nYou may call")
        assert '{"name": "weather", "description": "How it is."' in prompt
        await ask(client, tools=TOOLS)
        assert bytes(engine.submitted[-1]["ids"]).decode().startswith("<system>You may call")


@pytest.mark.parametrize("config", [{"enable_auto_tool_choice": False}, {"tool_call_parser": "none"}])
async def test_calls_of_its_own_accord_can_be_off(engine: FakeEngine, config: dict[str, Any]) -> None:
    app = create_app(engine, ServerConfig(**config))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
        error = (await client.post(PATH, json=body)).json()["error"]
        assert error["param"] == "tool_choice"
        assert "--enable-auto-tool-choice" in error["message"]
        engine.says = '{"city": "Oslo"}'
        assert (await ask(client, tools=TOOLS, tool_choice=NAMED))["message"]["tool_calls"]


async def test_marks_that_are_special_tokens_stay_in_the_text(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for special, kept in (("<tool_call>", True), ("<other>", False)):
        monkeypatch.setattr(type(engine.tokenizer), "token_bytes", lambda self, token, s=special: s.encode())
        app = create_app(engine, ServerConfig())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            await ask(client, tools=TOOLS, max_tokens=1)
            assert engine.submitted[-1]["params"].skip_special_tokens is not kept


async def test_mistral_has_short_ids(engine: FakeEngine) -> None:
    engine.says = '[TOOL_CALLS]weather{"city": "Oslo"}'
    app = create_app(engine, ServerConfig(tool_call_parser="mistral"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        (call,) = (await ask(client, tools=TOOLS))["message"]["tool_calls"]
        assert len(call["id"]) == 9
        assert call["id"].isalnum()


def test_flags_name_all_parsers() -> None:
    fields = ServerConfig.__dataclass_fields__
    assert set(fields["tool_call_parser"].metadata["choices"]) == {"auto", "none", *TOOL_PARSERS}
    assert set(fields["reasoning_parser"].metadata["choices"]) == {"none", *REASONING_PARSERS}


async def test_strict_functions_are_held_to_their_schemas_where_the_format_has_a_mark(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.says = HERMES
    strict = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}
    choice = await ask(client, tools=[strict, TOOLS[1]])
    assert len(choice["message"]["tool_calls"]) == 2
    assert engine.submitted[-1]["params"].structured_outputs.structural_tag == {
        "structures": [
            {"begin": '<tool_call>\n{"name": "weather", "arguments": ', "schema": SCHEMA, "end": "}\n</tool_call>"},
            {
                "begin": '<tool_call>\n{"name": "time", "arguments": ',
                "schema": {"type": "object"},
                "end": "}\n</tool_call>",
            },
        ],
        "triggers": ["<tool_call>"],
    }
    for parser in ("llama3_json", "qwen3_xml"):
        app = create_app(engine, ServerConfig(tool_call_parser=parser))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as other:
            await ask(other, tools=[strict])
        assert engine.submitted[-1]["params"].structured_outputs is None


@pytest.mark.parametrize("name", [name for name, parser in TOOL_PARSERS.items() if parser.strict])
def test_what_strict_calls_look_like_is_found_by_the_parser(name: str) -> None:
    before, behind = TOOL_PARSERS[name].tag("weather")
    assert before.startswith(TOOL_PARSERS[name].marks[0])
    parser = OutputParser(calls=TOOL_PARSERS[name].parse, tools={"weather": SCHEMA})
    piece = parser.push("So: " + before + '{"city": "Oslo"}' + behind, last=True)
    assert [(call.name, call.arguments) for call in piece.calls] == [("weather", '{"city":"Oslo"}')]
    assert piece.content == "So:"


async def test_structural_tags_in_both_fields(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    tag = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f>"]}
    for fields in (
        {"response_format": {"type": "structural_tag", **tag}},
        {"structured_outputs": {"structural_tag": tag}},
        {"structured_outputs": {"structural_tag": json.dumps(tag)}},
    ):
        await ask(client, max_tokens=1, **fields)
        assert engine.submitted[-1]["params"].structured_outputs.structural_tag == tag
    body = {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "text", "triggers": ["x"]}}
    response = await client.post(PATH, json=body)
    assert response.json()["error"]["param"] == "response_format"
