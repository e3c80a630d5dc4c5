"""Puts the pieces together: routes, what surrounds them, and how exceptions become answers."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from jaxserve.config import ServerConfig
from jaxserve.errors import JaxserveError
from jaxserve.metrics import Metrics
from jaxserve.server import (
    adapters,
    anthropic,
    chat,
    completions,
    control,
    debug,
    embeddings,
    live,
    models,
    openapi,
    operations,
    responses,
    scores,
    tokens,
    ui,
)
from jaxserve.server.access import Access, Keys
from jaxserve.server.bodies import Rules
from jaxserve.server.deadlines import with_deadlines
from jaxserve.server.errors import handle
from jaxserve.server.intake import Intake
from jaxserve.server.middleware import AbortOnDisconnect, AnswerErrors, RequestId
from jaxserve.server.protocol import Engine
from jaxserve.server.tracing import Tracer, Tracing

__all__ = ["create_app"]


def create_app(engine: Engine, config: ServerConfig) -> Starlette:
    """The ASGI app that serves ``engine``. It neither starts nor stops the engine.

    ConfigError: the file of keys cannot be used, or the packages for traces are not there.
    """
    served = models.ServedModels(engine, config.served_model_name)
    metrics = Metrics(
        served.names[0], engine.max_model_len, engine.stats, engine.config.cache, compat=config.metrics_compat
    )
    engine = with_deadlines(engine, metrics, config.ttft_timeout, config.request_timeout)
    names = debug.Names()
    engine = debug.with_names(engine, names)
    viewers = live.Live(engine, served.names[0])
    intake = Intake(Rules(engine.tokenizer, config, engine.max_model_len))
    tracer = None if config.otlp_traces_endpoint is None else Tracer(config.otlp_traces_endpoint, served.names[0])
    if tracer is not None:
        metrics.on_end = tracer.note
    described = [  # the first ones are found soonest
        *chat.routes(engine, served, metrics, intake),
        *completions.routes(engine, served, metrics, intake),
        *operations.routes(engine, metrics),
        *control.routes(engine),
        *live.routes(viewers),
        *debug.routes(engine, names, served.names[0]),
        *models.routes(served),
        *adapters.routes(engine, served),
        *tokens.routes(served, intake),
        *responses.routes(engine, served, metrics, intake),
        *anthropic.routes(engine, served, metrics, intake),
        *embeddings.routes(engine, served, metrics, intake),
        *scores.routes(engine, served, metrics, intake),
    ]
    app = Starlette(
        routes=[*described, *openapi.routes(described), *(ui.routes() if config.ui else [])],
        middleware=_around(config, metrics, tracer),
        exception_handlers={JaxserveError: handle, HTTPException: handle},
    )
    app.state.keep_alive_seconds = config.sse_keep_alive_interval
    app.state.intake = intake
    app.state.live = viewers
    app.state.tracer = tracer
    app.state.max_body = config.max_request_body
    app.router.redirect_slashes = False
    return app


def _around(config: ServerConfig, metrics: Metrics, tracer: Tracer | None) -> list[Middleware]:
    """From the outside in."""
    cors = Middleware(
        CORSMiddleware,
        allow_origins=config.allowed_origins,
        allow_methods=config.allowed_methods,
        allow_headers=config.allowed_headers,
        allow_credentials=config.allow_credentials,
        expose_headers=("Retry-After", "X-Request-Id", "x-jaxserve-ignored", "x-jaxserve-max-tokens"),
    )
    return [
        Middleware(RequestId, unlogged=frozenset(config.access_log_exclude) if config.access_log else None),
        # A browser asks before it sends a key, and must be let read a refusal.
        *([cors] if config.allowed_origins else []),
        Middleware(anthropic.Dialect),
        Middleware(
            Access,
            clients=Keys(config.client_keys()),
            operators=Keys(config.admin_api_key),
            max_concurrency=config.max_concurrency_per_key,
            ui=config.ui,
        ),
        *([] if tracer is None else [Middleware(Tracing, tracer=tracer)]),
        Middleware(AbortOnDisconnect, note=metrics.client_gone, endless=frozenset({live.LIVE_PATH})),
        Middleware(AnswerErrors),
    ]
