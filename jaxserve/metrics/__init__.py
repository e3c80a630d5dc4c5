"""What a scrape sees: Prometheus metrics of requests and of the engine, under our names and under vLLM's."""

from __future__ import annotations

from jaxserve.metrics.names import VLLM_NAMES
from jaxserve.metrics.requests import Metrics, RequestTracker

__all__ = ["VLLM_NAMES", "Metrics", "RequestTracker"]
