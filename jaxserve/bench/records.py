"""What happened to each request, and what all of them add up to.

Times are counted as a user sees them: by pieces of text. A server may hold a token back, for instance until its bytes
make up a character, so the time to the first token (ttft) ends when the first piece of text arrives, and an inter-token
latency (itl) is the gap between two pieces, which may hold several tokens. The time per output token (tpot) spreads the
time from the first piece to the last over all tokens but the first. Tokens are counted by the server (``usage``) if it
does so, and otherwise by pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxserve.bench.options import MetricOptions

__all__ = ["METRIC_TITLES", "Record", "percentile", "render", "summarise"]

METRIC_TITLES = {
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency", "ITL"),
    "e2el": ("End-to-end Latency", "E2EL"),
}


@dataclass(slots=True)
class Record:
    """One request; times in seconds of one clock.

    Attributes:
        started: when it was sent.
        pieces: when each piece of text came.
        finished: when its end came.
        num_prompt, num_output: tokens.
        error: why it failed, None if it did not.
    """

    started: float
    pieces: list[float] = field(default_factory=list)
    finished: float = 0.0
    num_prompt: int = 0
    num_output: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Seconds until the first text; until the end, if there was none."""
        return (self.pieces[0] if self.pieces else self.finished) - self.started

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None if there is no second one."""
        if self.num_output < 2 or not self.pieces:
            return None
        return (self.pieces[-1] - self.pieces[0]) / (self.num_output - 1)

    @property
    def itl(self) -> list[float]:
        """Seconds between successive pieces."""
        return [later - earlier for earlier, later in zip(self.pieces, self.pieces[1:], strict=False)]

    @property
    def e2el(self) -> float:
        """Seconds until the end."""
        return self.finished - self.started

    def meets(self, limits: dict[str, float]) -> bool:
        """Whether it stays within limits in milliseconds, by metric; what does not exist is within any."""
        return all(1e3 * (getattr(self, name) or 0.0) <= limit for name, limit in limits.items())


def percentile(values: Sequence[float], share: float) -> float:
    """The ``share`` percent quantile, between two values by their distance to it; 0 if there are none."""
    return float(np.percentile(values, share)) if len(values) else 0.0


def summarise(records: Sequence[Record], seconds: float, options: MetricOptions) -> dict[str, Any]:
    """Figures by vLLM's names; ``seconds`` is how long all took."""
    done = [record for record in records if record.error is None]
    failed = [record.error for record in records if record.error is not None]
    num_prompt, num_output = sum(r.num_prompt for r in done), sum(r.num_output for r in done)
    summary: dict[str, Any] = {
        "completed": len(done),
        "failed": len(failed),
        "first_error": failed[0] if failed else None,
        "duration": seconds,
        "total_input_tokens": num_prompt,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / seconds,
        "output_throughput": num_output / seconds,
        "total_token_throughput": (num_prompt + num_output) / seconds,
    }
    if options.limits:
        summary["request_goodput"] = sum(record.meets(options.limits) for record in done) / seconds
    for metric in options.metrics:
        values = _milliseconds(done, metric)
        summary[f"mean_{metric}_ms"] = sum(values) / len(values) if values else 0.0
        for share in options.percentiles:
            summary[f"p{share:g}_{metric}_ms"] = percentile(values, share)
    return summary


def _milliseconds(records: Sequence[Record], metric: str) -> list[float]:
    if metric == "itl":
        return [1e3 * gap for record in records for gap in record.itl]
    values = [getattr(record, metric) for record in records]
    return [1e3 * value for value in values if value is not None]


def render(title: str, summary: dict[str, Any], options: MetricOptions) -> str:
    """A summary as text, laid out like vLLM's."""
    lines = [f"{f' {title} ':=^58}"]

    def line(label: str, value: float | int) -> None:
        lines.append(f"{label + ':':<46}{value:>12}" if isinstance(value, int) else f"{label + ':':<46}{value:>12.2f}")

    line("Successful requests", summary["completed"])
    line("Failed requests", summary["failed"])
    line("Benchmark duration (s)", summary["duration"])
    line("Total input tokens", summary["total_input_tokens"])
    line("Total generated tokens", summary["total_output_tokens"])
    line("Request throughput (req/s)", summary["request_throughput"])
    if "request_goodput" in summary:
        line("Request goodput (req/s)", summary["request_goodput"])
    line("Output token throughput (tok/s)", summary["output_throughput"])
    line("Total token throughput (tok/s)", summary["total_token_throughput"])
    for metric in options.metrics:
        heading, short = METRIC_TITLES[metric]
        lines.append(f"{heading:-^58}")
        line(f"Mean {short} (ms)", summary[f"mean_{metric}_ms"])
        for share in options.percentiles:
            line(f"P{share:g} {short} (ms)", summary[f"p{share:g}_{metric}_ms"])
    lines.append("=" * 58)
    if summary["first_error"] is not None:
        lines.append(f"First error: {summary['first_error']}")
    return "\n".join(lines)
