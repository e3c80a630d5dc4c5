"""What a scrape sees: Prometheus metrics under vLLM's names, so that existing boards work, and a few of our own.

Counts that the engine keeps are read from ``EngineStats`` when a scrape comes; times are observed per request as its
outputs pass by. Every app has a registry of its own, so that two apps in one process do not mix.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxserve.errors import QueueFullError, RequestError
from jaxserve.outputs import CompletionOutput, EngineStats, RequestOutput
from jaxserve.request import FinishReason

__all__ = ["Metrics", "RequestTracker"]

_TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_GAP = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_LATENCY = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Metrics:
    """All metrics of one served model.

    Args:
        model_name: value of the label ``model_name``.
        max_model_len: upper end of the histograms of token counts.
        stats: gives the engine's counts; called once per scrape.
    """

    def __init__(self, model_name: str, max_model_len: int, stats: Callable[[], EngineStats]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(model_name, stats))
        self._model_name = model_name
        lengths = _one_two_five(max_model_len)
        self.ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token.", _TTFT)
        self.gap = self._histogram("inter_token_latency_seconds", "Time between tokens of one completion.", _GAP)
        self.latency = self._histogram("e2e_request_latency_seconds", "Arrival to last token.", _LATENCY)
        self.queue_time = self._histogram("request_queue_time_seconds", "Arrival to first step.", _LATENCY)
        self.prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens per request.", lengths)
        self.generation_tokens = self._histogram("request_generation_tokens", "Tokens per completion.", lengths)
        finished = Counter(
            "vllm:request_success", "Completions by end.", ("model_name", "finished_reason"), registry=self.registry
        )
        self.finished = {str(reason): finished.labels(model_name, str(reason)) for reason in FinishReason}

    def track(self, n: int) -> RequestTracker:
        """Context that follows one request for ``n`` completions."""
        return RequestTracker(self, n)

    def render(self) -> bytes:
        """The text of one scrape."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, help: str, edges: Sequence[float]) -> Histogram:
        histogram = Histogram(f"vllm:{name}", help, ("model_name",), buckets=edges, registry=self.registry)
        return histogram.labels(self._model_name)


class RequestTracker:
    """Observes the outputs of one request, and how it was left."""

    def __init__(self, metrics: Metrics, n: int) -> None:
        self._metrics = metrics
        self._unfinished = n
        self._tokens: dict[int, int] = {}
        self._newest_at: dict[int, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, RequestError | QueueFullError):
            return
        left = isinstance(error, asyncio.CancelledError | GeneratorExit)
        self._metrics.finished[FinishReason.ABORT if left else FinishReason.ERROR].inc(self._unfinished)

    def output(self, output: RequestOutput) -> None:
        """Observe the newest output."""
        times, now = output.metrics, time.monotonic()
        if not self._tokens and times.first_token_at:
            self._metrics.ttft.observe(times.first_token_at - times.arrived_at)
            self._metrics.queue_time.observe(max(0.0, times.scheduled_at - times.arrived_at))
            self._metrics.prompt_tokens.observe(len(output.prompt_token_ids))
        for completion in output.outputs:
            self._completion(completion, times.first_token_at or now, times.finished_at or now)
        if output.finished:
            self._metrics.latency.observe((times.finished_at or now) - times.arrived_at)

    def _completion(self, completion: CompletionOutput, first_at: float, now: float) -> None:
        index, num_new = completion.index, len(completion.token_ids)
        # Tokens that come together count with their mean gap; the very first token has none.
        num_gaps = num_new if index in self._tokens else num_new - 1
        if num_gaps > 0:
            gap = max(0.0, now - self._newest_at.get(index, first_at)) / num_gaps
            for _ in range(num_gaps):
                self._metrics.gap.observe(gap)
        if num_new:
            self._tokens[index] = self._tokens.get(index, 0) + num_new
            self._newest_at[index] = now
        if completion.finish_reason is not None:
            self._unfinished -= 1
            self._metrics.finished[completion.finish_reason].inc()
            self._metrics.generation_tokens.observe(self._tokens.get(index, 0))


class _EngineCollector(Collector):
    """Turns ``EngineStats`` into metrics at the moment of a scrape."""

    def __init__(self, model_name: str, stats: Callable[[], EngineStats]) -> None:
        self._label = model_name
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        padding = 1.0 - stats.last_step_tokens / stats.last_step_padded if stats.last_step_padded else 0.0
        gauges: tuple[tuple[str, str, float], ...] = (
            ("vllm:num_requests_running", "Sequences in the running batch.", stats.num_running),
            ("vllm:num_requests_waiting", "Sequences that wait for admission.", stats.num_waiting),
            ("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", stats.kv_usage),
            ("jaxserve:kv_cache_unused_ratio", "Share of the newest step's blocks without a token.", stats.kv_waste),
            ("jaxserve:step_padding_ratio", "Share of the newest step that was padding.", padding),
            ("jaxserve:spec_k", "Drafts verified per sequence of the newest step.", stats.last_step_drafts),
        )
        for name, help, value in gauges:
            gauge = GaugeMetricFamily(name, help, labels=("model_name",))
            gauge.add_metric((self._label,), value)
            yield gauge
        guessed = stats.speculation
        counters: tuple[tuple[str, str, int], ...] = (
            ("vllm:prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_queries_total),
            ("vllm:prefix_cache_hits", "Prompt tokens found.", stats.prefix_hits_total),
            ("vllm:num_preemptions", "Preemptions.", stats.preemptions_total),
            ("vllm:prompt_tokens", "Prompt tokens.", stats.prompt_tokens_total),
            ("vllm:generation_tokens", "Generated tokens.", stats.generation_tokens_total),
            ("vllm:spec_decode_num_drafts", "Times that a sequence had drafts verified.", guessed.num_drafts),
            ("vllm:spec_decode_num_draft_tokens", "Drafts verified.", guessed.num_draft_tokens),
            ("vllm:spec_decode_num_accepted_tokens", "Drafts that were right.", guessed.num_accepted_tokens),
            ("jaxserve:runtime_compiles", "Programs compiled after warm-up.", stats.runtime_compiles_total),
        )
        for name, help, value in counters:
            counter = CounterMetricFamily(name, help, labels=("model_name",))
            counter.add_metric((self._label,), value)
            yield counter
        yield self._labelled(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafts that were right, by their place.",
            "position",
            {str(position): count for position, count in enumerate(guessed.accepted_by_position)},
        )
        yield self._labelled("jaxserve:spec_disabled", "Times that speculation was paused.", "reason", guessed.disabled)
        yield self._step_sizes(stats.step_sizes)

    def _labelled(self, name: str, help: str, label: str, counts: Mapping[str, int]) -> Metric:
        family = CounterMetricFamily(name, help, labels=("model_name", label))
        for value, count in counts.items():
            family.add_metric((self._label, value), count)
        return family

    def _step_sizes(self, sizes: Mapping[int, int]) -> Metric:
        family = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens per step.", labels=("model_name",))
        buckets = [(str(float(edge)), sum(n for size, n in sizes.items() if size <= edge)) for edge in _STEP_TOKENS]
        buckets.append(("+Inf", sum(sizes.values())))
        family.add_metric((self._label,), buckets, sum(size * n for size, n in sizes.items()))
        return family


def _one_two_five(limit: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 ... up to ``limit``."""
    edges = [float(digit * 10**power) for power in range(len(str(limit))) for digit in (1, 2, 5)]
    return tuple(edge for edge in edges if edge <= max(limit, 1))
