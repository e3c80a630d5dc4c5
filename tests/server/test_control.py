"""What operators do to a server, how text becomes tokens, and what the server says of itself."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from jaxserve.server import openapi
from tests.server.fake import FakeEngine

pytestmark = pytest.mark.anyio

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


async def test_text_to_tokens_and_back(client: httpx.AsyncClient) -> None:
    plain = (await client.post("/tokenize", json={"prompt": "aß", "return_token_strs": True})).json()
    assert plain == {
        "count": 3,
        "max_model_len": 512,
        "tokens": [97, 195, 159],
        "token_strs": ["a", "\ufffd", "\ufffd"],
    }
    chat = (await client.post("/v1/tokenize", json={**CHAT, "return_token_strs": False})).json()
    back = (await client.post("/detokenize", json={"tokens": chat["tokens"]})).json()
    assert back == {"prompt": "<user>hi</><assistant>"}
    assert (await client.post("/v1/detokenize", json={"tokens": []})).json() == {"prompt": ""}
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {**CHAT, "prompt": "x"}, "prompt"),
        ("/tokenize", {**CHAT, "return_token_strs": "x"}, "return_token_strs"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {"tokens": [999]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
    ):
        refused = await client.post(path, json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert (await client.post("/tokenize", json={"prompt": "x", "model": "other"})).status_code == 404


async def test_a_server_is_paused_and_goes_on(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    assert (await client.get("/ready")).json() == {"status": "ready"}
    assert (await client.post("/pause")).json() == {"is_paused": True}
    assert (await client.get("/ready")).status_code == 503
    assert (await client.get("/health")).status_code == 200
    assert (await client.get("/is_paused")).json() == {"is_paused": True}
    await client.post("/resume")
    assert (await client.get("/ready")).status_code == 200
    assert (await client.post("/pause?mode=x")).json()["error"]["param"] == "mode"
    engine.dead = "dead"
    assert (await client.get("/ready")).status_code == 503


async def test_answers_are_aborted_by_their_ids(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.seconds_per_token = 0.01
    busy = [asyncio.create_task(client.post("/v1/chat/completions", json=CHAT)) for _ in range(2)]
    while len(engine.running) < 2:
        await asyncio.sleep(0.005)
    assert (await client.post("/reset_prefix_cache")).status_code == 409
    first = min(engine.running).rpartition("-")[0]
    assert (await client.post("/abort", json={"request_ids": [first, "x"]})).json() == {"aborted": [first]}
    while len(engine.running) > 1:
        await asyncio.sleep(0.005)
    assert (await client.post("/abort", json={"request_ids": ["x"]})).status_code == 404
    assert (await client.post("/abort", json={})).status_code == 400
    assert len((await client.post("/abort", json={"all": True})).json()["aborted"]) == 1
    assert {(await task).status_code for task in busy} == {503}
    assert (await client.post("/reset_prefix_cache")).json() == {"success": True}


async def test_what_the_server_says_of_itself(client: httpx.AsyncClient) -> None:
    info = (await client.get("/server_info")).json()
    assert (info["model"], info["max_model_len"], info["config"]["cache"]["block_size"]) == ("fake-model", 512, 16)
    described = (await client.get("/openapi.json")).json()
    assert described["openapi"] == "3.1.0"
    assert openapi._BODIES.keys() | {"/v2/rerank", "/v1/models/{name}", "/docs", "/health"} <= described["paths"].keys()
    schemas = described["components"]["schemas"]
    assert "messages" in schemas["ChatRequest"]["required"]
    references = {line.split('"')[3] for line in json.dumps(described, indent=1).splitlines() if '"$ref"' in line}
    assert {reference.rpartition("/")[2] for reference in references} <= schemas.keys()
    ids = [operation["operationId"] for path in described["paths"].values() for operation in path.values()]
    assert len(ids) == len(set(ids))
    page = await client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "POST /v1/responses" in page.text
    assert "http" not in page.text  # nothing is fetched from anywhere
