"""What a measurement can be asked for: the options of ``jaxserve bench``, from which its flags are made.

As in ``config``, a field holds its default and its help. Names follow vLLM's ``bench`` where it has the option. Nothing
is silently ignored: an option that means nothing to the chosen data set is an error.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from jaxserve.errors import ConfigError
from jaxserve.settings import check_choices

__all__ = [
    "ClaimsOptions",
    "DatasetOptions",
    "LatencyOptions",
    "MetricOptions",
    "OutputOptions",
    "ServeOptions",
    "StartupOptions",
]

METRICS = ("ttft", "tpot", "itl", "e2el")
_GOODPUT_METRICS = ("ttft", "tpot", "e2el")
_SLOWEST = 1e-6  # of a rate: a gap of more than a week is a mistake, and soon more than a clock counts
_LARGEST = 10**7  # of a number of prompts or tokens: all are made before the first is sent, and must fit into memory


def _option(default: Any, help: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help, **metadata})


@dataclass(frozen=True)
class DatasetOptions:
    """Which prompts, and how many tokens are asked for."""

    title: ClassVar[str] = "data set"
    dataset_name: str = _option(
        "text",
        "text: windows of English text; random: random token ids; sharegpt: conversations of a file; trace: lengths "
        "and arrival times of a file, with English text. All but sharegpt are sent as token ids, to a chat as text.",
        choices=("text", "random", "sharegpt", "trace"),
    )
    dataset_path: str | None = _option(None, "JSON or JSONL file of sharegpt, JSONL file of trace.")
    num_prompts: int | None = _option(None, "Number of requests; by default 64, of a trace all.", human=True)
    input_len: int | None = _option(
        None, "Prompt tokens of text; by default 16 to 512 (lognormal, median 96), always drawn alike.", human=True
    )
    output_len: int | None = _option(
        None,
        "Most new tokens of text and sharegpt; by default 16 to 256 for text, the answer's for sharegpt.",
        human=True,
    )
    random_input_len: int = _option(1024, "Mean prompt tokens of random.", human=True)
    random_output_len: int = _option(128, "Mean new tokens of random.", human=True)
    random_range_ratio: float = _option(0.0, "Lengths of random lie within this share of their means, 0 to below 1.")
    trace_speedup: float = _option(1.0, "Replay a trace so many times as fast.")

    def __post_init__(self) -> None:
        check_choices(self)
        for name in ("num_prompts", "input_len", "output_len", "random_input_len", "random_output_len"):
            _at_least(1, self, name)
            _at_most(_LARGEST, self, name)
        if not 0.0 <= self.random_range_ratio < 1.0:
            raise ConfigError(
                f"random_range_ratio must be in [0, 1), got {self.random_range_ratio}.", "random_range_ratio"
            )
        _positive(self, "trace_speedup")
        _at_least(_SLOWEST, self, "trace_speedup")
        from_file = self.dataset_name in ("sharegpt", "trace")
        if from_file and self.dataset_path is None:
            raise ConfigError(f"--dataset-name {self.dataset_name} needs --dataset-path.")
        for name, datasets in _MEANT_FOR.items():
            if getattr(self, name) != _default(self, name) and self.dataset_name not in datasets:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} has no effect with --dataset-name {self.dataset_name}.")


_MEANT_FOR: Mapping[str, tuple[str, ...]] = {
    "dataset_path": ("sharegpt", "trace"),
    "input_len": ("text",),
    "output_len": ("text", "sharegpt"),
    "random_input_len": ("random",),
    "random_output_len": ("random",),
    "random_range_ratio": ("random",),
    "trace_speedup": ("trace",),
}


@dataclass(frozen=True)
class ServeOptions:
    """Which server is loaded, and how."""

    title: ClassVar[str] = "load"
    base_url: str = _option("http://127.0.0.1:8000", "Address of a server with OpenAI's API.")
    endpoint: str = _option(
        "/v1/completions", "Path that is asked.", choices=("/v1/completions", "/v1/chat/completions")
    )
    model: str | None = _option(None, "Model's name on the server; by default the first that it lists.")
    tokenizer: str | None = _option(None, "Folder, GGUF file or hub id of the tokenizer; by default that of the model.")
    api_key: str | None = _option(None, "Key of the server.")
    request_rate: float = _option(math.inf, "Requests per second; inf sends all at once.")
    burstiness: float = _option(
        1.0, "Shape of the gamma distribution of the gaps: 1 is a Poisson process, less is in bursts, more is regular."
    )
    max_concurrency: int | None = _option(
        None, "Most requests under way; others wait, and their time does not run yet."
    )
    temperature: float = _option(0.0, "Temperature that is asked for.")
    ignore_eos: bool = _option(False, "Ask for exactly as many tokens as planned; not every server knows this.")
    seed: int = _option(0, "Picks texts, lengths and arrival times.")
    timeout: float = _option(600.0, "Seconds after which a request counts as failed.")

    def __post_init__(self) -> None:
        check_choices(self)
        for name in ("request_rate", "burstiness", "timeout"):
            _positive(self, name)
        _at_least(1, self, "max_concurrency")
        _at_least(_SLOWEST, self, "request_rate")
        if math.isinf(self.burstiness):
            raise ConfigError("burstiness must be finite, got inf.", "burstiness")
        if not 0.0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature must be finite and at least 0, got {self.temperature}.", "temperature")
        _at_least(0, self, "seed")
        if self.api_key is not None and not self.api_key.isascii():
            raise ConfigError("api_key must be of ASCII characters.", "api_key")


@dataclass(frozen=True)
class MetricOptions:
    """Which figures are shown. Times are in milliseconds."""

    title: ClassVar[str] = "figures"
    percentile_metrics: str = _option(
        "ttft,tpot,itl",
        "Of ttft (until the first text comes), tpot (mean time of a token after it), itl (gap between two pieces of "
        "text) and e2el (until the end), those that are shown, with commas.",
    )
    metric_percentiles: str = _option("50,90,99", "Percentiles that are shown, with commas.")
    goodput: tuple[str, ...] = _option(
        (), "Count requests within these limits, as in ttft:500 tpot:50 (milliseconds; ttft, tpot, e2el)."
    )

    def __post_init__(self) -> None:
        if unknown := [name for name in self.metrics if name not in METRICS]:
            raise ConfigError(
                f"percentile_metrics must be of {', '.join(METRICS)}, got {unknown[0]!r}.", "percentile_metrics"
            )
        if twice := [name for name, count in Counter(name for name, _ in self._goodput()).items() if count > 1]:
            raise ConfigError(f"goodput must name a metric once, got {twice[0]} twice.", "goodput")
        _ = self.percentiles

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the shown metrics."""
        return tuple(name.strip() for name in self.percentile_metrics.split(","))

    @property
    def percentiles(self) -> tuple[float, ...]:
        """The shown percentiles, 0..100."""
        return tuple(_percentile(text) for text in self.metric_percentiles.split(","))

    @property
    def limits(self) -> dict[str, float]:
        """Limits of goodput by metric, milliseconds."""
        return dict(self._goodput())

    def _goodput(self) -> list[tuple[str, float]]:
        return [_limit(text) for text in self.goodput]


@dataclass(frozen=True)
class OutputOptions:
    """Where results go."""

    title: ClassVar[str] = "results"
    save_result: bool = _option(False, "Save the results as JSON.")
    result_filename: str | None = _option(
        None, "File for them; by default jaxserve-bench-TIME.json. Implies --save-result."
    )


@dataclass(frozen=True)
class LatencyOptions:
    """The batch whose latency is measured."""

    title: ClassVar[str] = "batch"
    input_len: int = _option(32, "Prompt tokens of each request.", human=True)
    output_len: int = _option(128, "New tokens of each request.", human=True)
    batch_size: int = _option(8, "Number of requests.", human=True)
    num_iters: int = _option(10, "How often the batch is run.")
    num_iters_warmup: int = _option(2, "How often it is run before that.")

    def __post_init__(self) -> None:
        for name in ("input_len", "output_len", "batch_size", "num_iters"):
            _at_least(1, self, name)
        _at_least(0, self, "num_iters_warmup")


@dataclass(frozen=True)
class StartupOptions:
    """How often the engine is started."""

    title: ClassVar[str] = "starts"
    num_warm: int = _option(3, "Number of starts with filled caches, after one with empty ones.")

    def __post_init__(self) -> None:
        _at_least(1, self, "num_warm")


@dataclass(frozen=True)
class ClaimsOptions:
    """Which claims are checked, and how thoroughly."""

    title: ClassVar[str] = "claims"
    claims: str | None = _option(None, "Names of claims, with commas; by default all.")
    quick: bool = _option(False, "Fewer requests and one repeat: a trial, not a figure.")
    repeats: int | None = _option(None, "Runs of which the median is shown; by default 3, with --quick 1.")
    json: str | None = _option(None, "File for all figures as JSON.")
    output: str | None = _option(None, "SVG file for the tables and the picture.")

    def __post_init__(self) -> None:
        _at_least(1, self, "repeats")
        if self.output is not None and not self.output.endswith(".svg"):
            raise ConfigError(f"output must be a file that ends in .svg, got {self.output!r}.", "output")


def _default(part: Any, name: str) -> Any:
    return next(f.default for f in fields(part) if f.name == name)


def _at_least(least: float, part: Any, name: str) -> None:
    value = getattr(part, name)
    if value is not None and value < least:
        raise ConfigError(f"{name} must be at least {least}, got {value}.", name)


def _at_most(most: float, part: Any, name: str) -> None:
    value = getattr(part, name)
    if value is not None and value > most:
        raise ConfigError(f"{name} must be at most {most}, got {value}.", name)


def _positive(part: Any, name: str) -> None:
    value = getattr(part, name)
    if not value > 0:  # NaN is not
        raise ConfigError(f"{name} must be greater than 0, got {value}.", name)


def _percentile(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 <= value <= 100.0:
        raise ConfigError(f"metric_percentiles must be numbers from 0 to 100, got {text!r}.", "metric_percentiles")
    return value


def _limit(text: str) -> tuple[str, float]:
    name, _, number = text.partition(":")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if name not in _GOODPUT_METRICS or not value > 0:
        raise ConfigError(f"goodput must be like ttft:500, of {', '.join(_GOODPUT_METRICS)}, got {text!r}.", "goodput")
    return name, value
