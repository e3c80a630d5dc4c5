"""Endpoints that read prompts only, and what others tell of theirs: embeddings, scores, echoes, log probabilities."""

from __future__ import annotations

import base64
import math
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from jaxserve.config import ServerConfig
from jaxserve.server import create_app
from tests.server.fake import FakeEngine, FakeTokenizer

pytestmark = pytest.mark.anyio


@pytest.fixture
async def mean_client(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server that takes means by default."""
    app = create_app(engine, ServerConfig(pooling="mean"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        yield client


def test_embeddings_by_the_sdk(serve: Callable[..., str], engine: FakeEngine) -> None:
    with openai.OpenAI(base_url=serve(engine) + "/v1", api_key="none", max_retries=0) as sdk:
        # The SDK asks for base64 and decodes it.
        found = sdk.embeddings.create(model="fake-model", input=["ab", "b"])
        floats = sdk.embeddings.create(model="fake-model", input="ab", encoding_format="float")
        short = sdk.embeddings.create(model="fake-model", input=[[97, 98], [98]], dimensions=2)
    assert [item.index for item in found.data] == [0, 1]
    assert found.data[0].embedding == pytest.approx(np.array([0, 195, 98, 0]) / math.hypot(195, 98))
    assert found.usage.prompt_tokens == found.usage.total_tokens == 3
    assert floats.data[0].embedding == pytest.approx(found.data[0].embedding)
    assert [item.embedding for item in short.data] == [[0, 1], [0, 1]]


async def test_how_embeddings_are_made(client: httpx.AsyncClient, mean_client: httpx.AsyncClient) -> None:
    async def embed(client: httpx.AsyncClient, **body: Any) -> list[float]:
        response = await client.post("/v1/embeddings", json={"input": [97, 98], "normalize": False, **body})
        found: list[float] = response.json()["data"][0]["embedding"]
        return found

    assert await embed(client) == [0, 195, 98, 0]
    assert await embed(client, pooling="mean") == await embed(mean_client) == [0, 195, 98, 1]
    assert await embed(client, normalize=True, dimensions=1) == [0]
    encoded: Any = await embed(client, encoding_format="base64")
    assert np.frombuffer(base64.b64decode(encoded), "<f4").tolist() == [0, 195, 98, 0]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": "x", "dimensions": 5}, "dimensions"),
        ("/v1/embeddings", {"input": "x", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": ""}, "input"),
        ("/v1/embeddings", {"input": [5, 999]}, "input"),
        ("/v1/embeddings", {"input": "x", "pooling": "max"}, "pooling"),
        ("/v1/embeddings", {"input": "x", "encoding_format": "hex"}, "encoding_format"),
        ("/v1/embeddings", {"input": "x" * 600}, "input"),
        ("/v1/score", {"text_1": "x"}, "text_2"),
        ("/v1/score", {"text_1": ["x", "y"], "text_2": ["x", "y", "z"]}, "text_2"),
        ("/v1/score", {"text_1": "x", "text_2": ["y", ""]}, "text_2"),
        ("/v1/score", {"text_1": "x", "text_2": "y" * 9999}, "text_2"),
        ("/v1/score", {"text_1": "x", "query": "x", "text_2": "y"}, "query"),
        ("/v1/score", {"query": "x", "items": ["y"], "label_token_ids": [1]}, "label_token_ids"),
        ("/v1/rerank", {"query": "q", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "q", "documents": ["x" * 600]}, "documents"),
        ("/v1/rerank", {"query": "q", "documents": ["x"], "top_n": -1}, "top_n"),
        ("/v1/completions", {"prompt": "x", "suffix": "y"}, "suffix"),
        ("/v1/completions", {"prompt": "x", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": "x", "prompt_logprobs": 99}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 0}, "max_tokens"),
    ],
)
async def test_what_cannot_be_read(client: httpx.AsyncClient, path: str, body: dict[str, Any], param: str) -> None:
    response = await client.post(path, json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


async def test_scores_are_mean_log_probabilities_of_the_second_text(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    response = await client.post("/v1/score", json={"text_1": "ab", "text_2": ["de", "d"]})
    data = response.json()["data"]
    assert [item["score"] for item in data] == pytest.approx([-1.005, -1.0])
    assert engine.submitted[0]["ids"] == list(b"abde")
    assert response.json()["usage"]["total_tokens"] == 7
    other = await client.post("/score", json={"queries": ["ab", "c"], "documents": ["de", "d"]})
    assert [item["score"] for item in other.json()["data"]] == pytest.approx([-1.005, -1.0])


async def test_documents_are_ranked_by_how_likely_the_query_is_after_them(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(request_id: str, ids: list[int], *rest: Any) -> Any:
        out = FakeEngine._read(engine, request_id, ids, *rest)
        for entries in out.prompt_logprobs or ():
            for token, entry in (entries or {}).items():
                entries[token] = type(entry)(-ids[0] / 100, 1, "")  # type: ignore[index]
        return out

    monkeypatch.setattr(engine, "_read", read)
    documents: list[Any] = ["c", {"text": "a"}, "b"]
    response = await client.post("/v1/rerank", json={"query": "q", "documents": documents, "top_n": 2})
    first, second = response.json()["results"]
    assert (first["index"], first["document"], second["index"]) == (1, {"text": "a"}, 2)
    assert first["relevance_score"] == pytest.approx(math.exp(-0.97))
    assert bytes(engine.submitted[0]["ids"]) == b"c\n\nq"
    bare = await client.post("/v2/rerank", json={"query": "q", "documents": documents, "return_documents": False})
    assert len(bare.json()["results"]) == 3
    assert "document" not in bare.json()["results"][0]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_has_the_log_probabilities_of_the_prompt(client: httpx.AsyncClient, stream: bool) -> None:
    body = {"prompt": "aß", "echo": True, "logprobs": 2, "max_tokens": 3, "n": 2}
    if stream:
        lines = (await client.post("/v1/completions", json={**body, "stream": True})).text.split("\n\n")[:-2]
        pieces: list[Any] = [httpx.Response(200, text=line[6:]).json()["choices"][0] for line in lines]
        chosen = [piece for piece in pieces if piece["index"] == 1]
        text = "".join(piece["text"] for piece in chosen)
        lists = {name: [x for piece in chosen for x in piece["logprobs"][name]] for name in chosen[0]["logprobs"]}
    else:
        choice = (await client.post("/v1/completions", json=body)).json()["choices"][1]
        text, lists = choice["text"], choice["logprobs"]
    assert text == "aßwö"
    assert lists["tokens"][:3] == ["a", "\ufffd", "\ufffd"]
    assert lists["token_logprobs"][:4] == [None, -1.95, -1.59, -1.0]
    assert lists["text_offset"] == [0, 1, 1, 2, 3, 3]
    assert lists["top_logprobs"][0] is None
    assert len(lists["top_logprobs"][1]) == 3


async def test_an_echo_alone_and_log_probabilities_of_prompts(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = {"prompt": ["ab", "c"], "echo": True, "max_tokens": 0}
    answer = (await client.post("/v1/completions", json={**body, "logprobs": 0})).json()
    assert [choice["text"] for choice in answer["choices"]] == ["ab", "c"]
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.98]
    assert answer["usage"]["completion_tokens"] == 0
    plain = (await client.post("/v1/completions", json=body)).json()["choices"][0]
    assert (plain["text"], plain["logprobs"], plain["finish_reason"]) == ("ab", None, "length")
    asked = {"prompt": "ab", "prompt_logprobs": 1, "max_tokens": 1}
    shown = (await client.post("/v1/completions", json=asked)).json()["choices"][0]["prompt_logprobs"]
    assert shown == [
        None,
        {
            "98": {"logprob": -0.98, "rank": 9, "decoded_token": "b"},
            "1": {"logprob": -0.01, "rank": 1, "decoded_token": "\x01"},
        },
    ]
    chat = {"messages": [{"role": "user", "content": "x"}], "prompt_logprobs": 0, "max_tokens": 1}
    answer = (await client.post("/v1/chat/completions", json=chat)).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


async def test_a_suffix_is_filled_in_where_the_model_has_tokens_for_it(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = {"<|fim_prefix|>": 250, "<|fim_suffix|>": 251, "<|fim_middle|>": 252}
    monkeypatch.setattr(FakeTokenizer, "special_ids", frozenset(marks.values()))
    encode = FakeTokenizer.encode

    def with_marks(self: FakeTokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        return [marks[text]] if text in marks else encode(self, text)

    monkeypatch.setattr(FakeTokenizer, "encode", with_marks)
    response = await client.post("/v1/completions", json={"prompt": "ab", "suffix": "c", "max_tokens": 1})
    assert response.json()["choices"][0]["text"] == "H"
    assert engine.submitted[0]["ids"] == [250, 97, 98, 251, 99, 252]
    for body, param in (({"prompt": [1]}, "suffix"), ({"prompt": "x", "echo": True}, "echo")):
        refused = await client.post("/v1/completions", json={**body, "suffix": "y"})
        assert refused.json()["error"]["param"] == param
