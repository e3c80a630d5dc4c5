"""What operators and their tools ask: ``/health``, ``/ping``, ``/version``, ``/metrics``."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxserve import __version__
from jaxserve.metrics import Metrics
from jaxserve.server.jsonio import respond
from jaxserve.server.protocol import Engine

__all__ = ["routes"]


def routes(engine: Engine, metrics: Metrics) -> list[Route]:
    """Routes of this family."""

    async def health(request: Request) -> Response:
        engine.check_health()
        return respond({"status": "ok"})

    async def version(request: Request) -> Response:
        return respond({"version": __version__})

    async def scrape(request: Request) -> Response:
        return Response(metrics.render(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return [
        Route("/health", health),
        Route("/ping", health, methods=["GET", "POST"]),
        Route("/version", version),
        Route("/metrics", scrape),
    ]
