"""Metrics of requests, observed as their outputs pass by.

Every app has a registry of its own, so that two apps in one process do not mix. Metrics are kept without a prefix and
get it when they are shown: ``jaxserve:``, and ``vllm:`` once more for those that vLLM has, so that its boards work.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from jaxserve.config import CacheConfig
from jaxserve.errors import QueueFullError, RequestError
from jaxserve.metrics.engine import EngineCollector, timings_family
from jaxserve.metrics.names import (
    GAP_EDGES,
    LATENCY_EDGES,
    NUM_COMPLETIONS_EDGES,
    PREEMPTION_EDGES,
    TTFT_EDGES,
    VLLM_NAMES,
    one_two_five,
)
from jaxserve.outputs import CompletionOutput, EngineStats, RequestOutput
from jaxserve.request import FinishReason
from jaxserve.sampling_params import SamplingParams
from jaxserve.timings import Timings

__all__ = ["Metrics", "RequestTracker"]


class Metrics:
    """All metrics of one served model.

    Args:
        model_name: value of the label ``model_name``.
        max_model_len: upper end of the histograms of token counts.
        stats: gives the engine's counts; called once per scrape.
        cache: how KV memory was configured.
        compat: ``vllm`` shows what vLLM has under its names too, ``none`` does not.

    Attributes:
        timeouts: requests that were given up as late, by ``stage``.
        on_end: called with the last output of each request, and the number of tokens generated for it.
    """

    def __init__(
        self,
        model_name: str,
        max_model_len: int,
        stats: Callable[[], EngineStats],
        cache: CacheConfig | None = None,
        compat: str = "vllm",
    ) -> None:
        self._labels = {"model_name": model_name, "engine": "0"}
        self._compat = compat
        self.on_end: Callable[[RequestOutput, int], None] = lambda output, num_tokens: None
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(stats, cache or CacheConfig()))
        self._observe_times()
        self._observe_counts(one_two_five(max_model_len))
        finished = self._counter("request_success", "Completions by end.", "finished_reason")
        self.finished = {reason: finished.labels(finished_reason=str(reason)) for reason in FinishReason}
        self.timeouts = self._counter("request_timeouts", "Requests given up as late.", "stage")
        for stage in ("first_token", "generation"):
            self.timeouts.labels(stage=stage)
        gone = self._counter("client_disconnects", "Clients that went away before their answer was there.", "stage")
        self._gone = {begun: gone.labels(stage=stage) for begun, stage in ((False, "waiting"), (True, "streaming"))}

    def _observe_times(self) -> None:
        self.ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token.", TTFT_EDGES)
        self.gap = self._histogram("inter_token_latency_seconds", "Time between tokens of a completion.", GAP_EDGES)
        self.token_time = self._histogram(
            "request_time_per_output_token_seconds", "Mean time between tokens of a request.", GAP_EDGES
        )
        self.latency = self._histogram("e2e_request_latency_seconds", "Arrival to last token.", LATENCY_EDGES)
        self.queue_time = self._histogram("request_queue_time_seconds", "Arrival to first step.", LATENCY_EDGES)
        self.inference_time = self._histogram("request_inference_time_seconds", "First step to end.", LATENCY_EDGES)
        self.prefill_time = self._histogram("request_prefill_time_seconds", "First step to first token.", LATENCY_EDGES)
        self.decode_time = self._histogram("request_decode_time_seconds", "First token to last.", LATENCY_EDGES)

    def _observe_counts(self, lengths: Sequence[float]) -> None:
        self.prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens per request.", lengths)
        self.generation_tokens = self._histogram("request_generation_tokens", "Tokens per completion.", lengths)
        self.most_generated = self._histogram(
            "request_max_num_generation_tokens", "Tokens of a request's longest completion.", lengths
        )
        self.computed_tokens = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens per request that were computed.", lengths
        )
        self.asked_n = self._histogram("request_params_n", "Completions asked for.", NUM_COMPLETIONS_EDGES)
        self.asked_tokens = self._histogram("request_params_max_tokens", "max_tokens asked for.", lengths)
        self.preemptions = self._histogram(
            "request_num_preemptions", "Preemptions per request that had any.", PREEMPTION_EDGES
        )
        by_source = self._counter("prompt_tokens_by_source", "Prompt tokens by where their KV is from.", "source")
        self.computed = by_source.labels(source="local_compute")
        self.reused = by_source.labels(source="local_cache_hit")
        self.cached = self._counter("prompt_tokens_cached", "Prompt tokens from the prefix cache.")
        cached_by = self._counter("prompt_tokens_cached_by_source", "The same, by where it lay.", "source")
        self.cached_on_device = cached_by.labels(source="device")
        refused = self._counter("admission_rejections", "Requests refused for want of a place.", "reason")
        limits = ("max_num_queued_reqs", "max_num_queued_tokens")
        self.refused = {limit: refused.labels(reason=limit) for limit in limits}

    def track(self, params: SamplingParams) -> RequestTracker:
        """Context that follows one request."""
        return RequestTracker(self, params)

    def client_gone(self, begun: bool) -> None:
        """A client has gone away; ``begun`` says whether its answer had begun."""
        self._gone[begun].inc()

    def render(self) -> bytes:
        """The text of one scrape."""
        return generate_latest(_Shown(self.registry, self._labels, vllm=self._compat == "vllm"))

    def _histogram(self, name: str, help: str, edges: Sequence[float]) -> Timings:
        counts = Timings(tuple(map(float, edges)))
        self.registry.register(_Histogram(name, help, counts))
        return counts

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(name, help, labels, registry=self.registry)


class _Histogram(Collector):
    """A histogram that one thread adds to: a request adds to a dozen, and each token to one."""

    def __init__(self, name: str, help: str, counts: Timings) -> None:
        self._name = name
        self._help = help
        self._counts = counts

    def collect(self) -> Iterable[Metric]:
        yield timings_family(self._name, self._help, None, {"": self._counts})


class _Shown(Collector):
    """A registry as it is shown: every metric with its prefixes, every sample with the labels that all have."""

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str], *, vllm: bool) -> None:
        self._registry = registry
        self._labels = labels
        self._vllm = vllm

    def collect(self) -> Iterable[Metric]:
        for metric in self._registry.collect():
            yield self._prefixed("jaxserve:", metric)
            if self._vllm and metric.name in VLLM_NAMES:
                yield self._prefixed("vllm:", metric)

    def _prefixed(self, prefix: str, metric: Metric) -> Metric:
        shown = Metric(prefix + metric.name, metric.documentation, metric.type)
        shown.samples = [
            sample._replace(name=prefix + sample.name, labels={**sample.labels, **self._labels})
            for sample in metric.samples
        ]
        return shown


class RequestTracker:
    """Observes the outputs of one request, and how it was left."""

    def __init__(self, metrics: Metrics, params: SamplingParams) -> None:
        self._metrics = metrics
        self._params = params
        self._unfinished = params.n
        self._tokens: dict[int, int] = {}
        self._newest_at: dict[int, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, QueueFullError):
            self._metrics.refused[error.limit].inc()
        if error is None or isinstance(error, RequestError | QueueFullError):
            return
        left = isinstance(error, asyncio.CancelledError | GeneratorExit)
        self._metrics.finished[FinishReason.ABORT if left else FinishReason.ERROR].inc(self._unfinished)

    def output(self, output: RequestOutput) -> None:
        """Observe the newest output."""
        times, now = output.metrics, time.monotonic()
        if not self._tokens and times.first_token_at:
            self._begin(output)
        for completion in output.outputs:
            self._completion(completion, times.first_token_at or now, times.finished_at or now)
        if output.finished:
            self._end(output, times.finished_at or now)

    def _begin(self, output: RequestOutput) -> None:
        metrics, times = self._metrics, output.metrics
        num_tokens, num_cached = len(output.prompt_token_ids), output.num_cached_tokens
        metrics.ttft.add(times.first_token_at - times.arrived_at)
        metrics.queue_time.add(max(0.0, times.scheduled_at - times.arrived_at))
        metrics.prefill_time.add(max(0.0, times.first_token_at - times.scheduled_at))
        metrics.prompt_tokens.add(num_tokens)
        metrics.computed_tokens.add(num_tokens - num_cached)
        metrics.computed.inc(num_tokens - num_cached)
        for reused in (metrics.reused, metrics.cached, metrics.cached_on_device):
            reused.inc(num_cached)
        metrics.asked_n.add(self._params.n)
        if self._params.max_tokens is not None:
            metrics.asked_tokens.add(self._params.max_tokens)

    def _end(self, output: RequestOutput, now: float) -> None:
        metrics, times = self._metrics, output.metrics
        metrics.latency.add(now - times.arrived_at)
        metrics.on_end(output, sum(self._tokens.values()))
        if not times.first_token_at:
            return
        metrics.inference_time.add(max(0.0, now - times.scheduled_at))
        metrics.decode_time.add(max(0.0, now - times.first_token_at))
        most = max(self._tokens.values(), default=0)
        metrics.most_generated.add(most)
        if most > 1:
            metrics.token_time.add(max(0.0, now - times.first_token_at) / (most - 1))
        if times.num_preemptions:
            metrics.preemptions.add(times.num_preemptions)

    def _completion(self, completion: CompletionOutput, first_at: float, now: float) -> None:
        index, num_new = completion.index, len(completion.token_ids)
        # Tokens that come together count with their mean gap; the very first token has none.
        num_gaps = num_new if index in self._tokens else num_new - 1
        if num_gaps > 0:
            gap = max(0.0, now - self._newest_at.get(index, first_at)) / num_gaps
            for _ in range(num_gaps):
                self._metrics.gap.add(gap)
        if num_new:
            self._tokens[index] = self._tokens.get(index, 0) + num_new
            self._newest_at[index] = now
        if completion.finish_reason is not None:
            self._unfinished -= 1
            self._metrics.finished[FinishReason(completion.finish_reason)].inc()
            self._metrics.generation_tokens.add(self._tokens.get(index, 0))
