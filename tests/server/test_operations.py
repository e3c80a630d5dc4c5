"""Models, version, metrics."""

from __future__ import annotations

import json

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


async def test_adapters_and_their_slots_are_scraped(client: httpx.AsyncClient) -> None:
    shown = (await client.get("/metrics")).text
    labels = 'max_lora="2",model_name="fake-model",running_lora_adapters="sql,pirate",waiting_lora_adapters="notes"'
    assert f'vllm:lora_requests_info{{engine="0",{labels}}}' in shown
    assert await sample(client, "jaxserve:lora_slot_evictions_total") == 7
    assert await sample(client, "jaxserve:lora_load_seconds_bucket", le="0.01") == 0
    assert await sample(client, "jaxserve:lora_load_seconds_bucket", le="0.025") == 1
    assert "vllm:lora_load_seconds" not in shown


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


NAMES = {
    "vllm": {
        *("num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason", "kv_cache_usage_perc"),
        *("cache_config_info", "prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total"),
        *("prompt_tokens_total", "prompt_tokens_by_source_total", "prompt_tokens_cached_total"),
        *("prompt_tokens_cached_by_source_total", "generation_tokens_total", "request_success_total"),
        *("admission_rejections_total", "request_prompt_tokens", "request_generation_tokens"),
        *("iteration_tokens_total", "request_max_num_generation_tokens", "request_params_n"),
        *("request_params_max_tokens", "time_to_first_token_seconds", "inter_token_latency_seconds"),
        *("request_time_per_output_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"),
        *("request_inference_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
        *("request_num_preemptions", "request_prefill_kv_computed_tokens", "spec_decode_num_drafts_total"),
        *("spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total"),
        *("spec_decode_num_accepted_tokens_per_pos_total", "lora_requests_info"),
    },
    "jaxserve": {
        *("runtime_compiles_total", "step_padding_ratio", "step_duration_seconds", "last_step_age_seconds"),
        *("kv_blocks", "kv_internal_fragmentation_ratio", "preempted_recompute_tokens_total"),
        *("prefix_miss_tokens_total", "spec_disabled_total", "spec_k", "request_timeouts_total"),
        *("client_disconnects_total", "grammar_compile_seconds", "host_memory_bytes"),
        *("lora_load_seconds", "lora_slot_evictions_total"),
    },
}


@pytest.mark.parametrize("compat", ["vllm", "none"])
async def test_names(compat: str) -> None:
    app = create_app(FakeEngine(), ServerConfig(metrics_compat=compat))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        text = (await client.get("/metrics")).text
    shown = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    shown = {name for name in shown if not name.endswith("_created")}
    wanted = {f"jaxserve:{name}" for name in NAMES["vllm"] | NAMES["jaxserve"]}
    assert shown == wanted | ({f"vllm:{name}" for name in NAMES["vllm"]} if compat == "vllm" else set())


async def test_buckets_are_those_of_vllm(client: httpx.AsyncClient) -> None:
    for name, first, last, count in (
        ("time_to_first_token_seconds", "0.001", "2560.0", 22),
        ("inter_token_latency_seconds", "0.01", "80.0", 19),
        ("request_time_per_output_token_seconds", "0.01", "80.0", 19),
        ("e2e_request_latency_seconds", "0.3", "7680.0", 21),
        ("iteration_tokens_total", "1.0", "16384.0", 13),
        ("request_params_n", "1.0", "20.0", 5),
        ("request_num_preemptions", "1.0", "20.0", 7),
    ):
        head = f"vllm:{name}_bucket{{"
        lines = [line for line in (await client.get("/metrics")).text.splitlines() if line.startswith(head)]
        edges = [line.partition('le="')[2].partition('"')[0] for line in lines]
        assert (edges[0], edges[-2], edges[-1], len(edges)) == (first, last, "+Inf", count + 1)


async def test_requests_are_taken_apart(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.seconds_per_token = 0.01
    for stream in (False, True):
        body = {"prompt": "x" * 20, "max_tokens": 5, "n": 2, "stream": stream}
        await client.post("/v1/completions", json=body)
    for name, total in (
        ("request_params_n", 4),
        ("request_params_max_tokens", 10),
        ("request_max_num_generation_tokens", 10),
        ("request_prefill_kv_computed_tokens", 8),
    ):
        assert await sample(client, f"vllm:{name}_count") == 2
        assert await sample(client, f"vllm:{name}_sum") == total
    assert await sample(client, "vllm:prompt_tokens_by_source_total", source="local_cache_hit") == 32
    assert await sample(client, "vllm:prompt_tokens_by_source_total", source="local_compute") == 8
    assert await sample(client, "vllm:prompt_tokens_cached_total") == 32
    assert await sample(client, "vllm:prompt_tokens_cached_by_source_total", source="device") == 32
    prefill = await sample(client, "vllm:request_prefill_time_seconds_sum")
    decode = await sample(client, "vllm:request_decode_time_seconds_sum")
    assert await sample(client, "vllm:request_inference_time_seconds_sum") == pytest.approx(prefill + decode)
    assert await sample(client, "vllm:request_time_per_output_token_seconds_sum") == pytest.approx(decode / 4)
    assert await sample(client, "vllm:request_num_preemptions_count") == 0


async def test_a_refusal_for_want_of_a_place_is_counted(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.max_queued, engine.waiting = 1, {"other"}
    await client.post("/v1/completions", json={"prompt": "x"})
    assert await sample(client, "vllm:admission_rejections_total", reason="max_num_queued_reqs") == 1


async def test_state_of_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.running |= {"a"}
    engine.waiting |= {"b"}
    for state, count in (("active", 1), ("cached", 9), ("free", 90)):
        assert await sample(client, "jaxserve:kv_blocks", state=state) == count
    assert await sample(client, "vllm:num_requests_waiting_by_reason", reason="capacity") == 1
    assert await sample(client, "vllm:num_requests_waiting_by_reason", reason="deferred") == 2
    assert await sample(client, "jaxserve:prefix_miss_tokens_total", reason="cold") == 7
    assert await sample(client, "jaxserve:last_step_age_seconds") == 0.5
    assert await sample(client, "jaxserve:preempted_recompute_tokens_total") == 11
    assert await sample(client, "jaxserve:host_memory_bytes") > 2**20
    assert await sample(client, "jaxserve:step_duration_seconds_bucket", kind="decode", le="0.02") == 1
    assert await sample(client, "jaxserve:step_duration_seconds_count", kind="decode") == 2
    assert await sample(client, "jaxserve:step_duration_seconds_sum", kind="decode") == 0.515


@pytest.mark.parametrize("stream", [False, True])
async def test_times_of_a_request_that_asks_for_them(
    client: httpx.AsyncClient, engine: FakeEngine, stream: bool
) -> None:
    engine.seconds_per_token = 0.01
    body = {"prompt": ["a", "b"], "max_tokens": 4, "stream": stream, "include_metrics": True}
    text = (await client.post("/v1/completions", json=body)).text
    answer = json.loads(text.split("\n\n")[-3].removeprefix("data: ") if stream else text)
    assert len(answer["metrics"]) == 2
    for times in answer["metrics"]:
        parts = times["time_in_queue"] + times["prefill_time"] + times["decode_time"]
        assert times["e2e_latency"] == pytest.approx(parts)
        assert times["time_to_first_token"] == pytest.approx(times["time_in_queue"] + times["prefill_time"])
        assert times["decode_time"] > 0.02
    assert "metrics" not in (await client.post("/v1/completions", json={**body, "include_metrics": False})).text


async def test_two_apps_do_not_share_metrics(engine: FakeEngine) -> None:
    create_app(engine, ServerConfig())
    create_app(engine, ServerConfig())
