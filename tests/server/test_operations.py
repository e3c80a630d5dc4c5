"""Models, version, metrics."""

from __future__ import annotations

import httpx
import pytest

from jaxserve import __version__
from jaxserve.config import ServerConfig
from jaxserve.server import create_app
from tests.server.fake import FakeEngine

pytestmark = pytest.mark.anyio


async def sample(client: httpx.AsyncClient, name: str, **labels: str) -> float:
    """Value of one line of the scrape."""
    shown = ",".join(f'{key}="{value}"' for key, value in {**labels, "model_name": "fake-model", "engine": "0"}.items())
    lines = (await client.get("/metrics")).text.splitlines()
    wanted = {",".join(sorted(shown.split(",")))}
    for line in lines:
        head, _, value = line.rpartition(" ")
        if (
            head.partition("{")[0] == name
            and {",".join(sorted(head.partition("{")[2].rstrip("}").split(",")))} == wanted
        ):
            return float(value)
    raise AssertionError(f"no {name} {shown}")


async def test_models(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()
    (card,) = listed["data"]
    assert listed["object"] == "list"
    assert card.pop("created") > 0
    assert card == {
        "id": "fake-model",
        "object": "model",
        "owned_by": "jaxserve",
        "root": "fake-model",
        "parent": None,
        "max_model_len": 512,
    }
    assert (await client.get("/v1/models/fake-model")).json()["id"] == "fake-model"
    assert (await client.get("/v1/models/other")).status_code == 404


async def test_served_names_replace_the_model_s_own() -> None:
    app = create_app(FakeEngine(), ServerConfig(served_model_name=("org/a", "b")))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        assert [card["id"] for card in (await client.get("/v1/models")).json()["data"]] == ["org/a", "b"]
        assert (await client.get("/v1/models/org/a")).json()["root"] == "fake-model"
        for name, answered in (("b", "b"), (None, "org/a")):
            answer = await client.post("/v1/completions", json={"prompt": "x", "model": name})
            assert answer.json()["model"] == answered
        assert (await client.post("/v1/completions", json={"prompt": "x", "model": "fake-model"})).status_code == 404


async def test_version(client: httpx.AsyncClient) -> None:
    assert (await client.get("/version")).json() == {"version": __version__}


async def test_engine_counts_are_scraped(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.running |= {"a", "b"}
    engine.waiting |= {"c"}
    assert await sample(client, "vllm:num_requests_running") == 2
    assert await sample(client, "vllm:num_requests_waiting") == 1
    assert await sample(client, "vllm:kv_cache_usage_perc") == pytest.approx(0.02)
    assert await sample(client, "vllm:num_preemptions_total") == 3
    assert await sample(client, "jaxserve:runtime_compiles_total") == 0
    assert await sample(client, "jaxserve:step_padding_ratio") == 0.25
    assert await sample(client, "jaxserve:kv_internal_fragmentation_ratio") == 0.5
    for name in ("prefix_cache_queries", "prefix_cache_hits", "prompt_tokens", "generation_tokens"):
        assert await sample(client, f"vllm:{name}_total") == 0


async def test_drafts_are_counted(client: httpx.AsyncClient) -> None:
    assert await sample(client, "vllm:spec_decode_num_drafts_total") == 3
    assert await sample(client, "vllm:spec_decode_num_draft_tokens_total") == 12
    assert await sample(client, "vllm:spec_decode_num_accepted_tokens_total") == 5
    for position, count in (("0", 3), ("1", 2)):
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        assert await sample(client, name, position=position) == count
    assert await sample(client, "jaxserve:spec_disabled_total", reason="no gain") == 2
    assert await sample(client, "jaxserve:spec_k") == 1.5


async def test_step_sizes_become_a_histogram(client: httpx.AsyncClient) -> None:
    name = "vllm:iteration_tokens_total"
    assert await sample(client, f"{name}_bucket", le="1.0") == 4
    assert await sample(client, f"{name}_bucket", le="8.0") == 6
    assert await sample(client, f"{name}_bucket", le="16384.0") == 6
    assert await sample(client, f"{name}_bucket", le="+Inf") == 7
    assert await sample(client, f"{name}_sum") == 20016


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_are_observed(client: httpx.AsyncClient, engine: FakeEngine, stream: bool) -> None:
    engine.seconds_per_token = 0.012
    body = {"prompt": "abc", "max_tokens": 4, "n": 2, "stream": stream}
    await client.post("/v1/completions", json=body)
    await client.post("/v1/completions", json={**body, "n": 0})
    assert await sample(client, "vllm:request_success_total", finished_reason="length") == 2
    for other in ("abort", "error", "stop"):
        assert await sample(client, "vllm:request_success_total", finished_reason=other) == 0
    for name, count in (
        ("time_to_first_token_seconds", 1),
        ("request_queue_time_seconds", 1),
        ("e2e_request_latency_seconds", 1),
        ("request_prompt_tokens", 1),
        ("request_generation_tokens", 2),
        ("inter_token_latency_seconds", 6),
    ):
        assert await sample(client, f"vllm:{name}_count") == count
    assert await sample(client, "vllm:request_prompt_tokens_sum") == 3
    assert await sample(client, "vllm:request_generation_tokens_sum") == 8
    assert 0.06 < await sample(client, "vllm:inter_token_latency_seconds_sum") < 1
    assert await sample(client, "vllm:inter_token_latency_seconds_bucket", le="0.01") == 0


async def test_failures_are_counted(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.fails_at = 2
    await client.post("/v1/completions", json={"prompt": "abc"})
    assert await sample(client, "vllm:request_success_total", finished_reason="error") == 1


async def test_two_apps_do_not_share_metrics(engine: FakeEngine) -> None:
    create_app(engine, ServerConfig())
    create_app(engine, ServerConfig())
