"""Puts the pieces together: routes, what surrounds them, and how exceptions become answers."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from jaxserve.config import ServerConfig
from jaxserve.errors import JaxserveError
from jaxserve.metrics import Metrics
from jaxserve.server import (
    anthropic,
    chat,
    completions,
    control,
    embeddings,
    models,
    openapi,
    operations,
    responses,
    scores,
    tokens,
)
from jaxserve.server.errors import handle
from jaxserve.server.middleware import AbortOnDisconnect, AnswerErrors, ApiKey, RequestId
from jaxserve.server.protocol import Engine
from jaxserve.server.turns import Turns

__all__ = ["create_app"]


def create_app(engine: Engine, config: ServerConfig) -> Starlette:
    """The ASGI app that serves ``engine``. It neither starts nor stops the engine."""
    served = models.ServedModels(engine, config.served_model_name)
    metrics = Metrics(served.names[0], engine.max_model_len, engine.stats)
    turns = Turns(engine.tokenizer, config)
    strict = config.strict_params
    described = [
        *operations.routes(engine, metrics),
        *control.routes(engine),
        *models.routes(served),
        *tokens.routes(engine, served, turns, strict=strict),
        *completions.routes(engine, served, metrics, strict=strict),
        *chat.routes(engine, served, metrics, turns, strict=strict),
        *responses.routes(engine, served, metrics, turns, store_size=config.max_stored_responses, strict=strict),
        *anthropic.routes(engine, served, metrics, turns, strict=strict),
        *embeddings.routes(engine, served, metrics, config),
        *scores.routes(engine, served, metrics, strict=strict),
    ]
    app = Starlette(
        routes=[*described, *openapi.routes(described)],
        middleware=[
            Middleware(RequestId),
            Middleware(anthropic.Dialect),
            Middleware(ApiKey, keys=config.api_key),
            Middleware(AbortOnDisconnect),
            Middleware(AnswerErrors),
        ],
        exception_handlers={JaxserveError: handle, HTTPException: handle},
    )
    app.router.redirect_slashes = False
    return app
