"""``EngineStats`` as metrics, made at the moment of a scrape."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxserve.config import CacheConfig
from jaxserve.metrics.names import STEP_TOKEN_EDGES
from jaxserve.outputs import AdapterStats, EngineStats
from jaxserve.timings import Timings

__all__ = ["EngineCollector", "timings_family"]

_STATM = Path("/proc/self/statm")


class EngineCollector(Collector):
    """Reads ``stats`` once per scrape; ``cache`` is how KV memory was configured."""

    def __init__(self, stats: Callable[[], EngineStats], cache: CacheConfig) -> None:
        self._stats = stats
        self._cache = cache

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        yield from self._gauges(stats)
        yield from self._counters(stats)
        yield self._info(stats)
        yield _step_sizes(stats.step_sizes)
        yield timings_family("step_duration_seconds", "Time of steps by kind.", "kind", stats.step_seconds)
        yield timings_family(
            "grammar_compile_seconds", "Time that requests waited for a grammar.", None, {"": stats.grammar_seconds}
        )
        if stats.adapters is not None:
            yield from _adapters(stats.adapters)

    def _gauges(self, stats: EngineStats) -> Iterable[Metric]:
        padding = 1.0 - stats.last_step_tokens / stats.last_step_padded if stats.last_step_padded else 0.0
        plain = (
            ("num_requests_running", "Sequences in the running batch.", stats.num_running),
            ("num_requests_waiting", "Sequences that wait for admission.", stats.num_waiting),
            ("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", stats.kv_usage),
            ("kv_internal_fragmentation_ratio", "Share of the newest step's KV without a token.", stats.kv_waste),
            ("step_padding_ratio", "Share of the newest step that was padding.", padding),
            ("spec_k", "Drafts verified per sequence of the newest step.", stats.last_step_drafts),
            ("last_step_age_seconds", "Time since a step was done, 0 without work.", stats.last_step_age),
            ("host_memory_bytes", "Memory of the process (RSS).", _resident_bytes()),
        )
        for name, help, value in plain:
            yield _family(GaugeMetricFamily, name, help, None, {"": value})
        used = stats.num_blocks - stats.num_free_blocks
        free = stats.num_free_blocks - stats.num_cached_blocks
        blocks = {"active": used, "cached": stats.num_cached_blocks, "free": free}
        yield _family(GaugeMetricFamily, "kv_blocks", "KV blocks by state.", "state", blocks)
        waiting = {"capacity": stats.num_waiting, "deferred": stats.num_preparing}
        name, help = "num_requests_waiting_by_reason", "Waiting for a place in the batch, or for tokens or a grammar."
        yield _family(GaugeMetricFamily, name, help, "reason", waiting)

    def _counters(self, stats: EngineStats) -> Iterable[Metric]:
        guessed = stats.speculation
        plain = (
            ("prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_queries_total),
            ("prefix_cache_hits", "Prompt tokens found.", stats.prefix_hits_total),
            ("num_preemptions", "Preemptions.", stats.preemptions_total),
            ("preempted_recompute_tokens", "Tokens computed again after preemptions.", stats.recomputed_tokens_total),
            ("prompt_tokens", "Prompt tokens.", stats.prompt_tokens_total),
            ("generation_tokens", "Generated tokens.", stats.generation_tokens_total),
            ("spec_decode_num_drafts", "Times that a sequence had drafts verified.", guessed.num_drafts),
            ("spec_decode_num_draft_tokens", "Drafts verified.", guessed.num_draft_tokens),
            ("spec_decode_num_accepted_tokens", "Drafts that were right.", guessed.num_accepted_tokens),
            ("runtime_compiles", "Programs compiled after warm-up.", stats.runtime_compiles_total),
        )
        for name, help, value in plain:
            yield _family(CounterMetricFamily, name, help, None, {"": value})
        by_place = {str(place): count for place, count in enumerate(guessed.accepted_by_position)}
        labelled: tuple[tuple[str, str, str, Mapping[str, int]], ...] = (
            (
                "spec_decode_num_accepted_tokens_per_pos",
                "Drafts that were right, by their place.",
                "position",
                by_place,
            ),
            ("spec_disabled", "Times that speculation was paused.", "reason", guessed.disabled),
            ("prefix_miss_tokens", "Prompt tokens not found.", "reason", stats.prefix_misses),
        )
        for name, help, label, counts in labelled:
            yield _family(CounterMetricFamily, name, help, label, counts)

    def _info(self, stats: EngineStats) -> Metric:
        settings = {name: str(value) for name, value in asdict(self._cache).items()}
        settings["num_gpu_blocks"] = str(stats.num_blocks)
        family = GaugeMetricFamily("cache_config_info", "How KV memory is laid out.", labels=tuple(settings))
        family.add_metric(tuple(settings.values()), 1)
        return family


def _adapters(adapters: AdapterStats) -> Iterable[Metric]:
    """vLLM's metric has the names in its labels, and the time as its value."""
    labels = {
        "max_lora": str(adapters.num_slots),
        "waiting_lora_adapters": ",".join(adapters.waiting),
        "running_lora_adapters": ",".join(adapters.running),
    }
    info = GaugeMetricFamily("lora_requests_info", "Adapters that requests have or wait for.", labels=tuple(labels))
    info.add_metric(tuple(labels.values()), time.time())
    yield info
    evictions = {"": adapters.evictions_total}
    yield _family(CounterMetricFamily, "lora_slot_evictions", "Adapters that gave up their slot.", None, evictions)
    yield timings_family("lora_load_seconds", "Request for a slot to adapter in it.", None, {"": adapters.load_seconds})


def _family(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    help: str,
    label: str | None,
    values: Mapping[str, float],
) -> Metric:
    """One value, or one for each value of ``label``."""
    family = kind(name, help, labels=_labels(label))
    for value, count in values.items():
        family.add_metric(() if label is None else (value,), count)
    return family


def _step_sizes(sizes: Mapping[int, int]) -> Metric:
    family = HistogramMetricFamily("iteration_tokens_total", "Tokens per step.", labels=())
    buckets = [(str(float(edge)), sum(n for size, n in sizes.items() if size <= edge)) for edge in STEP_TOKEN_EDGES]
    buckets.append(("+Inf", sum(sizes.values())))
    family.add_metric((), buckets, sum(size * n for size, n in sizes.items()))
    return family


def timings_family(name: str, help: str, label: str | None, found: Mapping[str, Timings]) -> Metric:
    """A histogram, or one for each value of ``label``."""
    family = HistogramMetricFamily(name, help, labels=_labels(label))
    for value, timings in found.items():
        family.add_metric(() if label is None else (value,), timings.cumulative(), timings.total)
    return family


def _labels(label: str | None) -> tuple[str, ...]:
    return () if label is None else (label,)


def _resident_bytes() -> int:
    """0 where the system does not tell."""
    if not _STATM.exists():
        return 0
    return int(_STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
