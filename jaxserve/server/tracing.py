"""OpenTelemetry traces: a span per request, a child of the caller's if it sends one.

The packages are not needed unless an endpoint is configured. Attributes have the names of the semantic conventions for
generative AI, and vLLM's where these have none.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.errors import ConfigError
from jaxserve.outputs import RequestOutput
from jaxserve.server.access import route_path

__all__ = ["Tracer", "Tracing", "check_packages"]

_UNTRACED = frozenset({"/health", "/metrics", "/ping", "/ready"})


def check_packages() -> None:
    """ConfigError: the packages are not installed."""
    try:
        for name in ("opentelemetry.exporter.otlp.proto.http.trace_exporter", "opentelemetry.sdk.trace"):
            import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"otlp_traces_endpoint needs packages that are not installed: pip install 'jaxserve[otel]' ({error}).",
            "otlp_traces_endpoint",
        ) from None


class Tracer:
    """Sends spans to a collector, in a thread of its own. ConfigError: the packages are not installed."""

    def __init__(self, endpoint: str, model_name: str) -> None:
        check_packages()
        from opentelemetry import propagate, trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._provider = TracerProvider(resource=Resource.create({"service.name": "jaxserve"}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("jaxserve")
        self._model_name = model_name
        self._current: Callable[[], Any] = trace.get_current_span
        self._parent: Callable[..., Any] = propagate.extract
        self._server = trace.SpanKind.SERVER

    def span(self, scope: Scope) -> Any:
        """A context that is the span of an HTTP request; what runs within finds it."""
        return self._tracer.start_as_current_span(
            f"{scope['method']} {scope['path'][:256]}",
            context=self._parent(dict(Headers(scope=scope))),
            kind=self._server,
            attributes={
                "http.request.method": scope["method"],
                "url.path": scope["path"][:256],
                "gen_ai.response.model": self._model_name,
            },
        )

    def note(self, output: RequestOutput, num_tokens: int) -> None:
        """Tell the span at hand of a finished engine request, which has generated ``num_tokens``."""
        times = output.metrics
        self._current().set_attributes(
            {
                "gen_ai.request.id": output.request_id,
                "gen_ai.usage.prompt_tokens": len(output.prompt_token_ids),
                "gen_ai.usage.completion_tokens": num_tokens,
                "gen_ai.usage.cached_tokens": output.num_cached_tokens,
                "gen_ai.latency.time_in_queue": times.scheduled_at - times.arrived_at,
                "gen_ai.latency.time_to_first_token": times.first_token_at - times.arrived_at,
                "gen_ai.latency.e2e": times.finished_at - times.arrived_at,
            }
        )

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


class Tracing:
    """Puts every request into a span, but those of probes."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or route_path(scope) in _UNTRACED:
            await self._app(scope, receive, send)
            return
        with self._tracer.span(scope) as span:

            async def send_and_note(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                await send(message)

            await self._app(scope, receive, send_and_note)
