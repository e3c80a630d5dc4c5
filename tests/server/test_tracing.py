"""Traces, sent to a collector on a socket."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest

from jaxserve.config import ServerConfig
from jaxserve.errors import ConfigError
from jaxserve.server import create_app
from tests.server.fake import FakeEngine
from tests.server.test_errors import error_of


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes]]]:
    received: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            """Nothing is printed."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", received
        server.shutdown()
        thread.join()


@pytest.mark.anyio
@pytest.mark.filterwarnings("ignore")
async def test_a_span_per_request(collector: tuple[str, list[bytes]]) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    endpoint, received = collector
    app = create_app(FakeEngine(), ServerConfig(otlp_traces_endpoint=endpoint))
    caller = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        for stream in (False, True):
            body = {"prompt": "abc", "max_tokens": 5, "stream": stream}
            await client.post("/v1/completions", json=body, headers={"traceparent": caller})
        error_of(await client.post("/v1/completions", json={"prompt": ""}))
        await client.get("/health")
    behind_proxy = httpx.ASGITransport(app, root_path="/proxied")
    async with httpx.AsyncClient(transport=behind_proxy, base_url="http://test") as client:
        assert (await client.get("/proxied/health")).status_code == 200
    app.state.tracer.close()
    spans = [
        span
        for data in received
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    assert [span.name for span in spans] == ["POST /v1/completions"] * 3
    shown = [{item.key: item.value for item in span.attributes} for span in spans]
    for span, attributes in zip(spans[:2], shown[:2], strict=True):
        assert span.parent_span_id.hex() == "b7ad6b7169203331"
        assert attributes["http.response.status_code"].int_value == 200
        assert attributes["gen_ai.usage.prompt_tokens"].int_value == 3
        assert attributes["gen_ai.usage.completion_tokens"].int_value == 5
        assert attributes["gen_ai.latency.e2e"].double_value > 0
    assert shown[2]["http.response.status_code"].int_value == 400
    assert spans[2].parent_span_id == b""


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"jaxserve\[otel\]"):
        create_app(FakeEngine(), ServerConfig(otlp_traces_endpoint="http://127.0.0.1:1/v1/traces"))
