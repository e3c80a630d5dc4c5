"""Names of metrics, without prefix: which of them are vLLM's too, and the buckets of its histograms.

Those of vLLM that are not here speak of what jaxserve does not have: several engines, transfers of KV between them,
sleeping, images, watermarks, detection of corrupted logits and of repetition. Its ``--kv-cache-metrics`` and
``--enable-mfu-metrics`` are off by default there and missing here.
"""

from __future__ import annotations

__all__ = [
    "GAP_EDGES",
    "LATENCY_EDGES",
    "NUM_COMPLETIONS_EDGES",
    "PREEMPTION_EDGES",
    "STEP_TOKEN_EDGES",
    "TTFT_EDGES",
    "VLLM_NAMES",
    "one_two_five",
]

VLLM_NAMES = frozenset(
    {
        "admission_rejections",
        "cache_config_info",
        "e2e_request_latency_seconds",
        "generation_tokens",
        "inter_token_latency_seconds",
        "iteration_tokens_total",
        "kv_cache_usage_perc",
        "lora_requests_info",
        "num_preemptions",
        "num_requests_running",
        "num_requests_waiting",
        "num_requests_waiting_by_reason",
        "prefix_cache_hits",
        "prefix_cache_queries",
        "prompt_tokens",
        "prompt_tokens_by_source",
        "prompt_tokens_cached",
        "prompt_tokens_cached_by_source",
        "request_decode_time_seconds",
        "request_generation_tokens",
        "request_inference_time_seconds",
        "request_max_num_generation_tokens",
        "request_num_preemptions",
        "request_params_max_tokens",
        "request_params_n",
        "request_prefill_kv_computed_tokens",
        "request_prefill_time_seconds",
        "request_prompt_tokens",
        "request_queue_time_seconds",
        "request_success",
        "request_time_per_output_token_seconds",
        "spec_decode_num_accepted_tokens",
        "spec_decode_num_accepted_tokens_per_pos",
        "spec_decode_num_draft_tokens",
        "spec_decode_num_drafts",
        "time_to_first_token_seconds",
    }
)

TTFT_EDGES = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
GAP_EDGES = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
LATENCY_EDGES = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_TOKEN_EDGES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
NUM_COMPLETIONS_EDGES = (1, 2, 5, 10, 20)
PREEMPTION_EDGES = (1, 2, 3, 4, 5, 10, 20)


def one_two_five(limit: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 ... up to ``limit``."""
    edges = [float(digit * 10**power) for power in range(len(str(limit))) for digit in (1, 2, 5)]
    return tuple(edge for edge in edges if edge <= max(limit, 1))
