"""Whatever is sent, the answer is right or a clear error in OpenAI's shape; never a 500, never a dead server."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from jaxserve.config import EngineConfig, SchedulerConfig, ServerConfig
from jaxserve.server import create_app
from tests.server.fake import FakeEngine

pytestmark = pytest.mark.anyio

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MAX_BODY_BYTES = 16 * 2**20
JSON = {"content-type": "application/json"}
TOOL = {"type": "function", "function": {"name": "f"}}


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    error: dict[str, Any] = json.loads(response.text, parse_constant=refuse)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == status
    return error


async def still_works(client: httpx.AsyncClient) -> None:
    response = await client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 2})
    assert response.json()["choices"][0]["text"] == "He"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"true",
        b"null",
        b"123",
        b'"x"',
        b'{"prompt": "x", "messages": [], "temperature": NaN}',
        b'{"prompt": "x", "messages": [], "top_p": Infinity}',
        b'{"prompt": "x", "messages": [], "presence_penalty": -Infinity}',
        b'{"prompt": "x", "messages": [], "temperature": 1e999}',
        b'{"prompt": "x", "messages": [], "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "x\xff"}',
        b"\xef\xbb\xbf{}",
        b'{"prompt": "\\udcf0", "messages": [{"role": "user", "content": "\\ud83d"}]}',
        b'{"\\ud83d": 1}',
        b'{"a":' * 5_000,
        b"[" * 30_000,
    ],
)
async def test_bad_bodies(client: httpx.AsyncClient, path: str, body: bytes) -> None:
    error_of(await client.post(path, content=body, headers=JSON))
    await still_works(client)


async def test_how_deeply_a_body_may_nest(client: httpx.AsyncClient) -> None:
    for opening, value, closing in (("[", "1", "]"), ('{"a":', "[]", "}")):
        for depth in (199, 200, 3000):
            inner = depth - 1 - (value == "[]")
            body = f'{{"prompt": "x", "max_tokens": 1, "unknown": {opening * inner}{value}{closing * inner}}}'
            response = await client.post(COMPLETIONS, content=body, headers=JSON)
            if depth <= 200:
                assert response.status_code == 200
            else:
                assert "nests more than 200 levels deep" in error_of(response)["message"]
        deep = 200 - (value == "[]")
        body = f'{{"prompt": "x", "unknown": {opening * deep}{value}{closing * deep}}}'
        for path in (COMPLETIONS, CHAT, "/v1/responses", "/v1/embeddings", "/v1/score", "/tokenize", "/abort"):
            error = error_of(await client.post(path, content=body, headers=JSON))
            assert error["message"] == "the body nests more than 200 levels deep, which is the limit."
    # Many are not deep.
    body = f'{{"prompt": "x", "max_tokens": 1, "unknown": [{",".join(["[[]]"] * 500)}]}}'
    assert (await client.post(COMPLETIONS, content=body, headers=JSON)).status_code == 200


async def test_bodies_that_control_the_server_are_short(client: httpx.AsyncClient) -> None:
    error = error_of(await client.post("/abort", json={"request_ids": ["x" * 70_000]}))
    assert error["message"] == "the body is longer than 65536 bytes, which is the limit of this path."


async def test_lone_surrogate_is_named(client: httpx.AsyncClient) -> None:
    body = b'{"messages": [{"role": "user", "content": "emoji \\ud83d"}]}'
    error = error_of(await client.post(CHAT, content=body, headers=JSON))
    assert error["param"] == "messages"
    assert "\\ud83d" in error["message"]
    whole = b'{"prompt": "\\ud83e\\udd99", "max_tokens": 1}'
    assert (await client.post(COMPLETIONS, content=whole, headers=JSON)).status_code == 200


async def test_content_type_and_size(client: httpx.AsyncClient) -> None:
    assert (
        "text/plain"
        in error_of(await client.post(COMPLETIONS, content=b"{}", headers={"content-type": "text/plain"}))["message"]
    )
    error_of(await client.post(COMPLETIONS, content=b"{}"))
    long = b'"' + b"x" * MAX_BODY_BYTES + b'"'
    assert str(MAX_BODY_BYTES) in error_of(await client.post(COMPLETIONS, content=long, headers=JSON), 413)["message"]

    async def chunks() -> Any:
        for _ in range(17):
            yield b"x" * 2**20

    error_of(await client.post(COMPLETIONS, content=chunks(), headers=JSON), 413)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "16"}, "max_tokens"),
        ({"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
        ({"n": 0}, "n"),
        ({"n": 10**6}, "n"),
        ({"seed": 2**64}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", 5]}, "stop.1"),
        ({"logit_bias": {"99999999": 5}}, "logit_bias"),
        ({"logit_bias": {"AI": -100}}, "logit_bias"),
        ({"logit_bias": {"5": 1e9}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
        ({"priority": 1}, "priority"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"response_format": {"type": "json_schema", "schema": {}}}, "response_format.schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "nope"}}, "response_format.type"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_object", "json_schema": {"name": "x", "schema": {}}}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "x"}, "guided_regex"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": "[a-"}, "guided_regex"),
        ({"guided_regex": "x", "structured_outputs": {"regex": "x"}}, "guided_regex"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"structured_outputs": {"regex": "[a-"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "x", "choice": ["x"]}}, "structured_outputs"),
        ({"structured_outputs": {"regx": "x"}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"reasoning": ["", "x"], "regex": "x"}}, "structured_outputs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"use_beam_search": True}, "use_beam_search"),
    ],
)
async def test_bad_parameters_are_named_on_both_routes(
    client: httpx.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    for path, prompt in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": [{"role": "user", "content": "x"}]})):
        for stream in ({}, {"stream": True}):
            if fields.keys() & {"stream", "stream_options"} and stream:
                continue
            error = error_of(await client.post(path, json={**prompt, **stream, **fields}))
            assert error["type"] == "BadRequestError"
            assert error["param"] == param
            assert param.split(".")[0] in error["message"]
    await still_works(client)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [1.0]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["x"] * 2000}, "prompt"),
        ({"prompt": "x" * 600}, "prompt"),
        ({"prompt": "x", "echo": True, "suffix": "y"}, "echo"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "logprobs": True}, "logprobs"),
        ({"prompt": "x", "best_of": 2, "n": 3}, "best_of"),
        ({"prompt": "x", "best_of": 129}, "best_of"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
    ],
)
async def test_bad_completions(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], param: str
) -> None:
    for stream in (False, True):
        assert error_of(await client.post(COMPLETIONS, json={"stream": stream, **fields}))["param"] == param
    assert not engine.running
    await still_works(client)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": []}, "tools"),
        ({"tools": [{"type": "browser"}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools.0.function.parameters"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"function": {"name": "f"}}}, "tool_choice"),
        ({"tools": [TOOL], "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [TOOL], "guided_regex": "x", "tool_choice": "required"}, "guided_regex"),
        ({"functions": []}, "functions"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"logprobs": 1}, "logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ],
)
async def test_bad_chats(client: httpx.AsyncClient, fields: dict[str, Any], param: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    assert error_of(await client.post(CHAT, json=body))["param"] == param


@pytest.mark.parametrize("depth", [300, 800])
async def test_tools_that_nest_too_deeply(client: httpx.AsyncClient, depth: int) -> None:
    inner = '{"type":"object","properties":{"a":' * depth + "{}" + "}}" * depth
    tools = f'[{{"type":"function","function":{{"name":"f","parameters":{inner}}}}}]'
    for choice in ("auto", "required"):
        body = f'{{"messages":[{{"role":"user","content":"x"}}],"tools":{tools},"tool_choice":"{choice}"}}'
        error_of(await client.post(CHAT, content=body, headers=JSON))
    await still_works(client)


async def test_parameters_that_ask_for_nothing_are_taken(client: httpx.AsyncClient) -> None:
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 1,
        "user": "me",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "response_format": {"type": "text"},
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "tools": None,
        "modalities": ["text"],
    }
    assert (await client.post(CHAT, json=body)).status_code == 200
    nothing = {"prompt": "x", "max_tokens": 1, "n": 2, "best_of": 2, "suffix": None, "use_beam_search": False}
    assert (await client.post(COMPLETIONS, json=nothing)).status_code == 200


async def test_unknown_parameters_are_told_in_a_header(client: httpx.AsyncClient) -> None:
    for path, prompt in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": [{"role": "user", "content": "x"}]})):
        for stream in (False, True):
            body = {**prompt, "max_tokens": 1, "stream": stream, "temprature": 1, "new\nü": 2, "user": "me"}
            response = await client.post(path, json=body)
            assert response.status_code == 200
            assert response.headers["x-jaxserve-ignored"] == "temprature, new%0A%C3%BC"
        many = {f"x{i}": i for i in range(20)}
        header = (await client.post(path, json={**prompt, "max_tokens": 1, **many})).headers["x-jaxserve-ignored"]
        assert header.endswith("x15, and 4 more")
        assert "x-jaxserve-ignored" not in (await client.post(path, json={**prompt, "max_tokens": 1})).headers


async def test_a_strict_server_refuses_unknown_parameters_and_names_the_nearest() -> None:
    app = create_app(FakeEngine(), ServerConfig(strict_params=True))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        error = error_of(await client.post(COMPLETIONS, json={"prompt": "x", "max_token": 1}))
        assert error["message"] == "unknown parameter 'max_token'. Did you mean 'max_tokens'?"
        error = error_of(
            await client.post(CHAT, json={"messages": [{"role": "user", "content": "x"}], "temprature": 1})
        )
        assert error["param"] == "temprature"
        error = error_of(await client.post(COMPLETIONS, json={"prompt": "x", "temperature" * 2_000: 1}))
        assert "temper" in error["message"]
        assert len(str(error)) < 300


async def test_unknown_model_names_the_served_ones(client: httpx.AsyncClient) -> None:
    error = error_of(await client.post(COMPLETIONS, json={"prompt": "x", "model": "fake-modle"}), 404)
    assert (error["type"], error["param"]) == ("NotFoundError", "model")
    assert "Did you mean 'fake-model'?" in error["message"]


async def test_names_of_megabytes_are_not_sent_back(client: httpx.AsyncClient) -> None:
    name = "temperature" * 2_000
    error = error_of(await client.post(COMPLETIONS, json={"prompt": "x", "model": name}), 404)
    assert "temper" in error["message"]
    assert len(str(error)) < 300
    response = await client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1, name: 1})
    assert len(response.headers["x-jaxserve-ignored"]) == 64


async def test_unknown_routes_and_methods(client: httpx.AsyncClient) -> None:
    assert error_of(await client.get("/v2/nothing"), 404)["type"] == "Not Found"
    response = await client.get(COMPLETIONS)
    assert error_of(response, 405)["type"] == "Method Not Allowed"
    assert response.headers["allow"] == "POST"
    error_of(await client.post(COMPLETIONS + "/", json={}), 404)


async def test_priority_with_the_policy(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.config = EngineConfig(scheduler=SchedulerConfig(scheduling_policy="priority"))
    assert (await client.post(COMPLETIONS, json={"prompt": "x", "priority": -3})).status_code == 200
    assert engine.submitted[0]["priority"] == -3


async def test_queue_full(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.max_queued, engine.waiting = 1, {"other"}
    response = await client.post(COMPLETIONS, json={"prompt": "x", "stream": True})
    assert error_of(response, 503)["type"] == "ServiceUnavailableError"
    assert response.headers["retry-after"] == "1"


async def test_one_bad_prompt_of_several_aborts_the_others(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.seconds_per_token = 0.01
    error_of(await client.post(COMPLETIONS, json={"prompt": [[1], [999]], "stream": True}))
    assert not engine.running
    assert engine.aborted == 1


async def test_dead_engine_is_told_at_once(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    assert (await client.get("/health")).status_code == 200
    engine.dies_at = 3
    error_of(await client.post(COMPLETIONS, json={"prompt": "x"}), 503)
    assert "RuntimeError" in error_of(await client.get("/health"), 503)["message"]
    error_of(await client.post(COMPLETIONS, json={"prompt": "x", "stream": True}), 503)


@pytest.mark.parametrize(("fault", "code"), [("dies_at", 503), ("fails_at", 500)])
async def test_error_inside_a_stream_is_an_event(
    client: httpx.AsyncClient, engine: FakeEngine, fault: str, code: int
) -> None:
    setattr(engine, fault, 3)
    response = await client.post(COMPLETIONS, json={"prompt": "x", "stream": True})
    assert response.status_code == 200
    *chunks, error, done = response.text.strip().split("\n\n")
    assert len(chunks) == 3
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == code
    assert done == "data: [DONE]"
    engine.dead = None
    message = error_of(await client.post(COMPLETIONS, json={"prompt": "x"}), code)["message"]
    if fault == "fails_at":
        assert message == "the engine failed to generate this answer: the fake fails."


async def test_unforeseen_errors_keep_their_details_in_the_log(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(engine, "check_health", broken)
    for path in (COMPLETIONS, CHAT):
        body = {"prompt": "x"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
        response = await client.post(path, json=body)
        assert "secret" not in error_of(response, 500)["message"]
        assert response.headers["x-request-id"]


async def test_request_id(client: httpx.AsyncClient) -> None:
    own = (await client.get("/health")).headers["x-request-id"]
    assert own != (await client.get("/health")).headers["x-request-id"]
    for path in ("/health", "/nowhere"):
        assert (await client.get(path, headers={"X-Request-Id": "abc-1"})).headers["x-request-id"] == "abc-1"
    assert (await client.get("/health", headers={"X-Request-Id": "x" * 500})).headers["x-request-id"] != "x" * 500
