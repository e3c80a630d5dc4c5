"""Exceptions to answers, in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``, code = HTTP status."""

from __future__ import annotations

import http
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.errors import EngineDeadError, JaxserveError, ModelNotFoundError, QueueFullError, RequestError
from jaxserve.logging import get_logger
from jaxserve.server.jsonio import respond

__all__ = ["AbortedError", "ErrorAnswer", "GenerationError", "NotFoundError", "describe", "handle"]

_log = get_logger(__name__)


class GenerationError(JaxserveError):
    """The engine could not go on with a request that it had accepted (HTTP 500)."""


class NotFoundError(RequestError):
    """A request names something that is not there (HTTP 404)."""


class AbortedError(JaxserveError):
    """The engine was told to drop a request that it had accepted (HTTP 503)."""


@dataclass(frozen=True)
class ErrorAnswer:
    """One error as a client sees it."""

    status: int
    type: str
    message: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """The JSON object of the body, or of the stream's event."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.status}
        return {"error": error}

    def response(self) -> Response:
        return respond(self.body(), self.status, self.headers)


def describe(error: Exception) -> ErrorAnswer:
    """What to tell the client; what nobody foresaw is logged, and told without its details."""
    match error:
        case ModelNotFoundError():
            return ErrorAnswer(404, "NotFoundError", str(error), error.param or "model")
        case NotFoundError():
            return ErrorAnswer(404, "NotFoundError", str(error), error.param)
        case RequestError():
            return ErrorAnswer(400, "BadRequestError", str(error), error.param)
        case QueueFullError():
            return ErrorAnswer(503, "ServiceUnavailableError", str(error), headers={"Retry-After": "1"})
        case EngineDeadError() | AbortedError():
            return ErrorAnswer(503, "ServiceUnavailableError", str(error))
        case GenerationError():
            return ErrorAnswer(500, "InternalServerError", str(error))
        case HTTPException():
            phrase = http.HTTPStatus(error.status_code).phrase
            return ErrorAnswer(error.status_code, phrase, error.detail, headers=dict(error.headers or {}))
    _log.error("unexpected error while serving a request", exc_info=error)
    return ErrorAnswer(500, "InternalServerError", "internal server error; the server's log has the details.")


async def handle(request: Request, error: Exception) -> Response:
    """Starlette's exception handler for exceptions that are raised on purpose."""
    return describe(error).response()
