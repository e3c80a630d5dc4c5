"""What /v1/completions answers, plain and streamed."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from jaxserve.config import EngineConfig
from jaxserve.sampling_params import SamplingParams, StructuredOutputsParams
from jaxserve.server.schema import ChatRequest, CompletionRequest
from tests.server.fake import SCRIPT, FakeEngine

pytestmark = pytest.mark.anyio

PATH = "/v1/completions"


async def post(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post(PATH, json={"model": "fake-model", **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def events(client: httpx.AsyncClient, **body: Any) -> list[dict[str, Any]]:
    response = await client.post(PATH, json={"model": "fake-model", "stream": True, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *lines, last = response.text.strip().split("\n\n")
    assert last == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def test_plain_answer_has_openai_shape(client: httpx.AsyncClient) -> None:
    answer = await post(client, prompt="0123456789012345678", max_tokens=5)
    assert answer.pop("id").startswith("cmpl-")
    assert isinstance(answer.pop("created"), int)
    assert answer == {
        "object": "text_completion",
        "model": "fake-model",
        "choices": [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "length", "stop_reason": None}],
        "usage": {
            "prompt_tokens": 19,
            "completion_tokens": 5,
            "total_tokens": 24,
            "prompt_tokens_details": {"cached_tokens": 16},
        },
    }


async def test_sixteen_tokens_by_default(client: httpx.AsyncClient) -> None:
    assert (await post(client, prompt="x"))["usage"]["completion_tokens"] == 16


async def test_every_form_of_prompt(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for prompt, ids in (
        ("ab", [[97, 98]]),
        (["ab", "c"], [[97, 98], [99]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
    ):
        engine.submitted.clear()
        answer = await post(client, prompt=prompt, max_tokens=1)
        assert [s["ids"] for s in engine.submitted] == ids
        assert [choice["index"] for choice in answer["choices"]] == list(range(len(ids)))
        assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))


async def test_choices_are_numbered_over_prompts_and_n(client: httpx.AsyncClient) -> None:
    plain = await post(client, prompt=["a", "b"], n=2, max_tokens=6)
    assert [(c["index"], c["text"]) for c in plain["choices"]] == list(enumerate(["Hello ", "wörld"] * 2))
    assert plain["usage"]["completion_tokens"] == 24
    texts = [""] * 4
    for event in await events(client, prompt=["a", "b"], n=2, max_tokens=6):
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == [choice["text"] for choice in plain["choices"]]


async def test_the_best_of_several(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    texts = [choice["text"] for choice in (await post(client, prompt="a", n=4, max_tokens=6))["choices"]]
    answer = await post(client, prompt=["a", "b"], n=2, best_of=4, max_tokens=6, echo=True)
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [
        (0, "a" + texts[3]),
        (1, "a" + texts[2]),
        (2, "b" + texts[3]),
        (3, "b" + texts[2]),
    ]
    assert [choice["logprobs"] for choice in answer["choices"]] == [None] * 4
    assert answer["usage"]["completion_tokens"] == 2 * 4 * 6
    (best,) = (await post(client, prompt="a", best_of=3, max_tokens=6, logprobs=1))["choices"]
    assert best["text"] == texts[2]
    assert len(best["logprobs"]["tokens"]) == 6
    response = await client.post(PATH, json={"prompt": "a", "best_of": 3, "stream": True})
    assert response.json()["error"]["param"] == "best_of"


@pytest.mark.parametrize("extra", [{}, {"echo": True}, {"stop": "time"}, {"logprobs": 2}, {"n": 3, "logprobs": 0}])
async def test_stream_joined_is_the_plain_answer(client: httpx.AsyncClient, extra: dict[str, Any]) -> None:
    body = {"prompt": "ď 🦙 日本", "max_tokens": 60, **extra}
    plain = await post(client, **body)
    joined: dict[int, dict[str, Any]] = {}
    for event in await events(client, **body):
        (choice,) = event["choices"]
        assert "�" not in choice["text"]
        so_far = joined.setdefault(choice["index"], {**choice, "text": "", "logprobs": None})
        so_far["text"] += choice["text"]
        so_far["finish_reason"], so_far["stop_reason"] = choice["finish_reason"], choice["stop_reason"]
        if choice["logprobs"]:
            so_far["logprobs"] = so_far["logprobs"] or {name: [] for name in choice["logprobs"]}
            for name, values in choice["logprobs"].items():
                so_far["logprobs"][name] += values
    assert [joined[index] for index in sorted(joined)] == plain["choices"]


async def test_nothing_of_a_stop_string_is_sent(client: httpx.AsyncClient) -> None:
    got = await events(client, prompt="x", max_tokens=60, stop=["upon a"])
    assert "".join(e["choices"][0]["text"] for e in got) == SCRIPT[: SCRIPT.index("upon a")]
    assert got[-1]["choices"][0]["finish_reason"] == "stop"
    assert got[-1]["choices"][0]["stop_reason"] == "upon a"


async def test_echo_shows_the_prompt_once(client: httpx.AsyncClient) -> None:
    assert (await post(client, prompt="ab ", echo=True, max_tokens=5))["choices"][0]["text"] == "ab Hello"
    assert (await post(client, prompt=[97, 32], echo=True, max_tokens=5))["choices"][0]["text"] == "a Hello"


async def test_usage_chunk_comes_last_and_has_no_choices(client: httpx.AsyncClient) -> None:
    got = await events(client, prompt="abc", max_tokens=4, stream_options={"include_usage": True})
    assert got[-1]["choices"] == []
    assert got[-1]["usage"]["completion_tokens"] == 4
    assert got[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert all(event["usage"] is None for event in got[:-1])
    assert "usage" not in (await events(client, prompt="abc"))[0]


async def test_usage_tells_of_drafts_where_the_engine_speculates(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    assert "completion_tokens_details" not in (await post(client, prompt="x"))["usage"]
    engine.config = EngineConfig.from_flat({"spec_method": "ngram"})
    wanted = {
        "accepted_prediction_tokens": 8,
        "rejected_prediction_tokens": 8,
        "accepted_prediction_tokens_per_position": [8],
    }
    assert (await post(client, prompt=["x", "y"], max_tokens=4))["usage"]["completion_tokens_details"] == wanted
    got = await events(client, prompt=["x", "y"], max_tokens=4, stream_options={"include_usage": True})
    assert got[-1]["usage"]["completion_tokens_details"] == wanted


async def test_continuous_usage_counts_up(client: httpx.AsyncClient) -> None:
    got = await events(client, prompt="abc", max_tokens=4, stream_options={"continuous_usage_stats": True})
    assert [event["usage"]["completion_tokens"] for event in got] == [1, 2, 3, 4]


async def test_logprobs_shape(client: httpx.AsyncClient) -> None:
    answer = await post(client, prompt="x", max_tokens=9, logprobs=2)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"][:2] == ["H", "e"]
    assert logprobs["token_logprobs"] == [-1.0] * 9
    assert logprobs["top_logprobs"][0] == {"<eos>": -0.5, "H": -1.0}
    # The eighth token is the first half of a character; both halves begin where it does.
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4, 5, 6, 7, 7]


async def test_logprobs_zero_is_the_chosen_token_alone(client: httpx.AsyncClient) -> None:
    logprobs = (await post(client, prompt="x", max_tokens=2, logprobs=0))["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-1.0, -1.0]
    assert logprobs["top_logprobs"] == [{"H": -1.0}, {"e": -1.0}]


async def test_minus_infinity_is_valid_json(client: httpx.AsyncClient) -> None:
    logprobs = (await post(client, prompt="x", max_tokens=1, logprobs=5))["choices"][0]["logprobs"]
    assert min(logprobs["top_logprobs"][0].values()) == -9999.0


async def test_every_sampling_parameter_arrives(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    given = {
        "n": 2,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.2,
        "seed": 2**63 - 1,
        "stop": ["a", "b"],
        "stop_token_ids": [5],
        "ignore_eos": True,
        "min_tokens": 1,
        "max_tokens": 3,
        "logprobs": 1,
        "logit_bias": {"5": 1},
        "allowed_token_ids": [1, 2],
        "bad_words": ["bad"],
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "logprobs_mode": "processed_logprobs",
        "detokenize": True,
    }
    given |= {"structured_outputs": {"regex": "a"}, "prompt_logprobs": 2}
    assert given.keys() == SamplingParams.names()
    expected = {**given, "logit_bias": {5: 1.0}, "structured_outputs": StructuredOutputsParams(regex="a")}
    await post(client, prompt="x", cache_salt="salt", **given)
    (submitted,) = engine.submitted
    assert submitted["params"] == SamplingParams(**expected)  # type: ignore[arg-type]
    assert submitted["cache_salt"] == "salt"


def test_both_endpoints_take_every_sampling_parameter() -> None:
    assert SamplingParams.names() <= CompletionRequest.model_fields.keys() & ChatRequest.model_fields.keys()


async def test_null_is_the_default(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    names = CompletionRequest.model_fields.keys() - {"prompt", "model"}
    await post(client, prompt="x", **dict.fromkeys(names))
    assert engine.submitted[0]["params"] == SamplingParams()


async def test_seed_minus_one_and_zero(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for seed in (-1, 0, 2**63 - 1, -(2**63)):
        await post(client, prompt="x", seed=seed)
    assert [s["params"].seed for s in engine.submitted] == [None, 0, 2**63 - 1, -(2**63)]


async def test_huge_max_tokens_is_left_to_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = await post(client, prompt="x" * 20, max_tokens=10_000_000)
    assert answer["usage"]["completion_tokens"] == engine.max_model_len - 20


@pytest.mark.parametrize("stream", [False, True])
async def test_a_limit_beyond_the_context_is_told_in_a_header(client: httpx.AsyncClient, stream: bool) -> None:
    body = {"prompt": "y" * 500, "stream": stream}
    response = await client.post("/v1/completions", json={**body, "max_tokens": 50})
    assert response.headers["x-jaxserve-max-tokens"] == "12"
    response = await client.post("/v1/completions", json={**body, "max_tokens": 12})
    assert "x-jaxserve-max-tokens" not in response.headers
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 10_000, "stream": stream}
    assert int((await client.post("/v1/chat/completions", json=chat)).headers["x-jaxserve-max-tokens"]) < 512


async def test_several_greedy_completions(client: httpx.AsyncClient) -> None:
    assert len((await post(client, prompt="x", n=3, temperature=0))["choices"]) == 3
