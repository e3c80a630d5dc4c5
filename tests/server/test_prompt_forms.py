"""What requests may say of their prompts and ids, and how tokens are shown by id."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.server.fake import FakeEngine, FakeTokenizer

pytestmark = pytest.mark.anyio

TEXT = {"prompt": "abcd", "max_tokens": 2}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
PATHS = (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT))


async def pieces(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    lines = (await client.post(path, json={**body, "stream": True})).text.split("\n\n")[:-2]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def test_tokens_are_told_by_id(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = {**TEXT, "return_token_ids": True, "logprobs": 1, "return_tokens_as_token_ids": True}
    choice = (await client.post("/v1/completions", json=body)).json()["choices"][0]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([72, 101], [97, 98, 99, 100])
    assert choice["logprobs"]["tokens"] == ["token_id:72", "token_id:101"]
    assert choice["logprobs"]["top_logprobs"][0].keys() == {"token_id:72", "token_id:256"}
    streamed = [chunk["choices"][0] for chunk in await pieces(client, "/v1/completions", body)]
    assert [piece["token_ids"] for piece in streamed] == [[72], [101]]
    assert [piece["prompt_token_ids"] for piece in streamed] == [[97, 98, 99, 100], None]

    body = {**CHAT, "return_token_ids": True, "logprobs": True, "return_tokens_as_token_ids": True}
    answer = (await client.post("/v1/chat/completions", json=body)).json()
    assert answer["choices"][0]["token_ids"] == [72, 101]
    assert answer["prompt_token_ids"] == engine.submitted[-1]["ids"]
    assert answer["choices"][0]["logprobs"]["content"][1]["token"] == "token_id:101"
    chunks = await pieces(client, "/v1/chat/completions", body)
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [engine.submitted[-1]["ids"], None, None]
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[], [72], [101]]
    assert "token_ids" not in (await client.post("/v1/completions", json=TEXT)).json()["choices"][0]


async def test_prompts_are_cut_from_their_beginning(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for path, body in (*PATHS, ("/v1/embeddings", {"input": "abcd"})):
        await client.post(path, json=body)
        whole = engine.submitted[-1]["ids"]
        await client.post(path, json={**body, "truncate_prompt_tokens": 3})
        assert engine.submitted[-1]["ids"] == whole[-3:]
        for most in (0, 512, -2):
            refused = (await client.post(path, json={**body, "truncate_prompt_tokens": most})).json()["error"]
            assert refused["param"] == "truncate_prompt_tokens"
    response = await client.post("/v1/completions", json={"prompt": "x" * 900, "truncate_prompt_tokens": -1})
    assert response.json()["usage"]["prompt_tokens"] == 511


async def test_special_tokens_and_documents(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    encode = FakeTokenizer.encode

    def spy(self: FakeTokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        seen.append(add_special_tokens)
        return encode(self, text)

    monkeypatch.setattr(FakeTokenizer, "encode", spy)
    await client.post("/v1/completions", json={**TEXT, "add_special_tokens": False})
    assert seen == [False]
    documents = [{"title": "t", "text": "x"}]
    refused = (await client.post("/v1/chat/completions", json={**CHAT, "documents": documents})).json()["error"]
    assert refused["param"] == "documents"
    monkeypatch.setattr(FakeTokenizer, "chat_template", "documents")
    await client.post("/v1/chat/completions", json={**CHAT, "documents": documents})
    assert "'title': 't'" in FakeTokenizer().decode(engine.submitted[-1]["ids"])


async def test_requests_bring_their_own_ids(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.seconds_per_token = 0.02
    slow = asyncio.create_task(client.post("/v1/completions", json={**TEXT, "request_id": "mine-1", "max_tokens": 50}))
    while not engine.running:
        await asyncio.sleep(0.005)
    again = await client.post("/v1/completions", json={**TEXT, "request_id": "mine-1"})
    assert again.json()["error"]["param"] == "request_id"
    assert (await client.post("/abort", json={"request_ids": ["cmpl-mine-1"]})).status_code == 200
    assert (await slow).status_code == 503
    for path, body in PATHS:
        answer = (await client.post(path, json={**body, "request_id": "mine-2"})).json()
        assert answer["id"].endswith("cmpl-mine-2")
        for bad in ("", "a b", "x" * 200):
            assert (await client.post(path, json={**body, "request_id": bad})).json()["error"]["param"] == "request_id"
