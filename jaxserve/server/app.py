"""Puts the pieces together: routes, what surrounds them, and how exceptions become answers."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from jaxserve.config import ServerConfig
from jaxserve.errors import JaxserveError
from jaxserve.metrics import Metrics
from jaxserve.server import anthropic, chat, completions, embeddings, models, operations, responses, scores
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
    app = Starlette(
        routes=[
            *operations.routes(engine, metrics),
            *models.routes(served),
            *completions.routes(engine, served, metrics, strict=config.strict_params),
            *chat.routes(engine, served, metrics, turns, strict=config.strict_params),
            *responses.routes(
                engine, served, metrics, turns, store_size=config.max_stored_responses, strict=config.strict_params
            ),
            *embeddings.routes(engine, served, metrics, config),
            *scores.routes(engine, served, metrics, strict=config.strict_params),
            *anthropic.routes(engine, served, metrics, turns, strict=config.strict_params),
        ],
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
