"""The openai SDK against a live server of the real model."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import httpx
import openai
import pytest

from jaxserve import LLM, SamplingParams

QUESTION: list[Any] = [{"role": "user", "content": "Name three colours."}]


def client(server: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0, timeout=120)


def metric(server: str, name: str) -> float:
    found = re.search(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", httpx.get(f"{server}/metrics").text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def test_the_model_is_listed_and_healthy(server: str) -> None:
    assert httpx.get(f"{server}/health").status_code == 200
    (model,) = client(server).models.list().data
    assert model.id == "smollm2-135m"


def test_stream_and_plain_answers_are_those_of_the_offline_api(server: str, llm: LLM) -> None:
    api = client(server)
    asked: dict[str, Any] = {"model": "smollm2-135m", "messages": QUESTION, "temperature": 0, "max_tokens": 24}
    plain = api.chat.completions.create(**asked)
    chunks = list(api.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    (offline,) = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
    assert plain.choices[0].message.content == streamed == offline.outputs[0].text
    assert plain.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens == len(offline.outputs[0].token_ids)


def test_32_mixed_requests_at_once(server: str) -> None:
    """Streams and plain answers, chats and completions, greedy and sampled, short and long; each equals its rerun."""

    async def one(api: openai.AsyncOpenAI, i: int) -> str:
        common: dict[str, Any] = {"model": "smollm2-135m", "max_tokens": 4 + i % 13, "seed": i}
        common["temperature"] = 0.0 if i % 3 == 0 else 0.9
        if i % 2:
            prompt = f"Item {i}: " + "word " * (7 * (i % 9))
            if i % 4 == 1:
                stream = await api.completions.create(**common, prompt=prompt, stream=True)
                return "".join([c.choices[0].text async for c in stream if c.choices])
            return (await api.completions.create(**common, prompt=prompt)).choices[0].text
        messages: list[Any] = [{"role": "user", "content": f"Tell me about the number {i}."}]
        if i % 4 == 2:
            chat = await api.chat.completions.create(**common, messages=messages, stream=True)
            return "".join([c.choices[0].delta.content or "" async for c in chat if c.choices])
        answer = await api.chat.completions.create(**common, messages=messages, top_p=0.9)
        return answer.choices[0].message.content or ""

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0, timeout=170) as api:
            together = await asyncio.gather(*[one(api, i) for i in range(32)])
            for i in (1, 2, 3, 12, 31):
                assert await one(api, i) == together[i]

    asyncio.run(run())
    assert metric(server, "vllm:num_requests_running") == 0
    assert metric(server, "vllm:kv_cache_usage_perc") == 0


def test_streams_cut_no_character(server: str) -> None:
    api = client(server)
    for prompt, sampled in (("ď 🦙 日本", {"temperature": 0}), ("🦙🦙🦙 日本 ", {"temperature": 1.5, "seed": 1})):
        asked: dict[str, Any] = {"model": "smollm2-135m", "prompt": prompt, "max_tokens": 30, **sampled}
        text = api.completions.create(**asked).choices[0].text
        parts = [chunk.choices[0].text for chunk in api.completions.create(**asked, stream=True)]
        assert "".join(parts) == text
        assert sum(part.count("\ufffd") for part in parts) == text.count("\ufffd")
        assert not text.isascii()


def test_nothing_of_a_stop_string_is_streamed(server: str) -> None:
    prompt = "Here is the English alphabet: ABC"
    asked: dict[str, Any] = {"model": "smollm2-135m", "prompt": prompt, "max_tokens": 20, "temperature": 0}
    for stop, text, reason in (
        ("DEFGHIJ", "", "stop"),
        ("HIJK", "DEFG", "stop"),
        ("HIJKX", "DEFGHIJKLMNOPQR", "length"),
    ):
        chunks = list(client(server).completions.create(**asked, stop=stop, stream=True))
        got = "".join(chunk.choices[0].text for chunk in chunks)
        assert got == text or (reason == "length" and got.startswith(text))
        assert chunks[-1].choices[0].finish_reason == reason


def test_texts_differ_unless_a_seed_or_greed_makes_them_equal(server: str) -> None:
    async def texts(*asked: dict[str, Any]) -> set[str]:
        async with httpx.AsyncClient(base_url=server, timeout=120) as api:
            common = {"prompt": "My name is", "max_tokens": 12, "temperature": 1.0}
            answers = await asyncio.gather(*[api.post("/v1/completions", json=common | more) for more in asked])
        return {answer.json()["choices"][0]["text"] for answer in answers}

    for top_k in ({}, {"top_k": 0}, {"top_k": -1}):
        assert len(asyncio.run(texts(*[{"seed": seed, **top_k} for seed in range(8)]))) > 1
    assert len(asyncio.run(texts(*[{}] * 5))) > 1
    assert len(asyncio.run(texts(*[{"seed": 0}] * 5))) == 1
    assert len(asyncio.run(texts({"top_k": 1, "seed": 1}, {"top_k": 1, "seed": 2}, {"temperature": 0}))) == 1


def test_lengths_beyond_a_step_and_beyond_the_context(server: str) -> None:
    api = client(server)
    prompt = list(range(100, 100 + 1016))
    asked: dict[str, Any] = {"model": "smollm2-135m", "temperature": 0, "extra_body": {"ignore_eos": True}}
    whole = api.completions.create(**asked, prompt=prompt, max_tokens=10_000_000)
    assert whole.usage is not None
    assert (whole.usage.completion_tokens, whole.choices[0].finish_reason) == (8, "length")
    asked |= {"messages": [{"role": "user", "content": "word " * 980}], "max_tokens": 2**53 - 1}
    chat = api.chat.completions.create(**asked)
    assert chat.usage is not None
    assert chat.usage.total_tokens == 1024
    with pytest.raises(openai.BadRequestError, match="1024"):
        api.completions.create(model="smollm2-135m", prompt=[100] * 1024, max_tokens=1)


def test_dropped_streams_free_their_blocks(server: str) -> None:
    async def drop(api: httpx.AsyncClient) -> None:
        body = {"model": "smollm2-135m", "prompt": "Once", "max_tokens": 900, "ignore_eos": True, "stream": True}
        async with api.stream("POST", "/v1/completions", json=body) as response:
            async for _ in response.aiter_lines():
                return

    async def run() -> float:
        async with httpx.AsyncClient(base_url=server, timeout=120) as api:
            await asyncio.gather(*[drop(api) for _ in range(20)])
        for _ in range(50):
            await asyncio.sleep(0.1)
            if metric(server, "vllm:num_requests_running") + metric(server, "vllm:num_requests_waiting") == 0:
                break
        return metric(server, "vllm:kv_cache_usage_perc")

    assert asyncio.run(run()) == 0


def test_bad_requests_are_refused_and_disturb_nobody(server: str) -> None:
    api = client(server)
    for wrong in ({"temperature": -1}, {"prompt": ""}, {"logit_bias": {"99999999": 5}}, {"max_tokens": 0}):
        asked: dict[str, Any] = {"model": "smollm2-135m", "prompt": "Hi", "max_tokens": 2, **wrong}
        with pytest.raises(openai.BadRequestError):
            api.completions.create(**asked)
    with pytest.raises(openai.NotFoundError):
        api.completions.create(model="gpt-5", prompt="Hi")
    assert api.completions.create(model="smollm2-135m", prompt="Hi", max_tokens=2).usage is not None
    assert metric(server, "jaxserve:runtime_compiles_total") == 0
