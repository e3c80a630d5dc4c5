"""The load of ``vllm bench serve``: what its backends openai and openai-chat send, and how they read what comes back.

Both look at pieces as the network cuts them, strip each of white space, and count every chunk with choices as a token;
the chunk without any tells the usage. That holds only if no chunk is split by an empty line, or waits for one.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.server.fake import SCRIPT, FakeEngine

pytestmark = pytest.mark.anyio

PROMPT = "Name three rivers of France, please."
NUM_TOKENS = 7  # "Hello w"
BACKENDS: dict[str, tuple[str, Callable[[int], dict[str, Any]]]] = {
    "openai": (
        "/v1/completions",
        lambda most: {"prompt": PROMPT, "repetition_penalty": 1.0, "max_tokens": most, "logprobs": None},
    ),
    "openai-chat": (
        "/v1/chat/completions",
        lambda most: {
            "messages": [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}],
            "max_completion_tokens": most,
        },
    ),
}


@dataclass
class Measured:
    """What the benchmark keeps of one request: times in seconds since it was sent."""

    text: str = ""
    times: list[float] = field(default_factory=list)
    output_tokens: int = 0
    num_blank: int = 0
    prompt_len: int = 0


class Messages:
    """Pieces of the network to events: those that an empty line ends, and a rest that is whole by itself."""

    def __init__(self) -> None:
        self._rest = ""

    def push(self, piece: bytes) -> Iterator[str]:
        self._rest += piece.strip().decode()
        *whole, self._rest = self._rest.split("\n\n")
        yield from filter(None, map(str.strip, whole))
        data = self._rest.removeprefix("data: ")
        if data == self._rest:
            return
        try:
            if data != "[DONE]":
                json.loads(data)
        except json.JSONDecodeError:
            return
        yield self._rest
        self._rest = ""


async def measure(client: httpx.AsyncClient, backend: str, model: str, name: str) -> Measured:
    path, body_of = BACKENDS[backend]
    body = {
        "model": model,
        **body_of(NUM_TOKENS),
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    measured, messages, began = Measured(), Messages(), time.perf_counter()
    async with client.stream("POST", path, json=body, headers={"x-request-id": name}) as response:
        assert response.status_code == 200
        assert response.headers["x-request-id"] == name
        assert "x-jaxserve-ignored" not in response.headers
        async for piece in response.aiter_raw():
            measured.num_blank += not piece.strip()
            for message in messages.push(piece):
                if message.startswith(":") or (data := message.removeprefix("data: ")) == "[DONE]":
                    continue
                chunk = json.loads(data)
                if choices := chunk.get("choices"):
                    first = choices[0]
                    measured.text += (first["delta"].get("content") if "delta" in first else first["text"]) or ""
                    measured.times.append(time.perf_counter() - began)
                elif usage := chunk.get("usage"):
                    measured.output_tokens = usage["completion_tokens"]
                    measured.prompt_len = usage["prompt_tokens"]
    return measured


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_load_of_many_streams(serve: Callable[..., str], backend: str) -> None:
    engine = FakeEngine(seconds_per_token=0.005, max_running=8)
    async with httpx.AsyncClient(
        base_url=serve(engine, strict_params=True, sse_keep_alive_interval=0.02), timeout=30
    ) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        found = await asyncio.gather(*(measure(client, backend, model, f"bench-{i}") for i in range(24)))
        metrics = (await client.get("/metrics")).text
    text = SCRIPT.encode()[:NUM_TOKENS].decode()
    chunks = NUM_TOKENS + (backend == "openai-chat")  # which opens with the role
    for measured in found:
        assert (measured.text, measured.output_tokens) == (text, NUM_TOKENS)
        assert len(measured.times) == chunks
        assert measured.prompt_len == len(engine.submitted[0]["ids"])
        assert measured.times == sorted(measured.times)
    assert sum(measured.num_blank for measured in found) > 0  # of those that had to wait
    # They come as they are generated.
    assert statistics.median(measured.times[-1] - measured.times[0] for measured in found) > 0.01
    assert all(one["params"].ignore_eos for one in engine.submitted)
    # Its report on drafts is read from here, by names and positions.
    drafts = [line for line in metrics.splitlines() if line.startswith("vllm:spec_decode")]
    assert any('position="0"' in line for line in drafts)
    assert all(float(line.split()[-1]) >= 0 for line in drafts)
