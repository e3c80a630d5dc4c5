"""Exceptions to answers, in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``, code = HTTP status."""

from __future__ import annotations

import http
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.errors import EngineDeadError, JaxserveError, ModelNotFoundError, QueueFullError, RequestError
from jaxserve.logging import get_logger
from jaxserve.server.jsonio import respond

__all__ = ["AbortedError", "ErrorAnswer", "GenerationError", "LateError", "NotFoundError", "describe", "handle"]

_log = get_logger(__name__)


class GenerationError(JaxserveError):
    """The engine could not go on with a request that it had accepted (HTTP 500)."""


class NotFoundError(RequestError):
    """A request names something that is not there (HTTP 404)."""


class AbortedError(JaxserveError):
    """The engine was told to drop a request that it had accepted (HTTP 503)."""


class LateError(JaxserveError):
    """A request was given up after a limit of so many seconds (HTTP 504, or 503 if it is that of the first token).

    Attributes:
        is_total: it was the limit of the whole request.
        stage: ``first_token`` or ``generation``: what it was late with.
    """

    def __init__(self, seconds: float, *, has_begun: bool, is_total: bool) -> None:
        what, flag = ("is not finished", "request") if is_total else ("has no first token", "ttft")
        super().__init__(f"the request {what} after {seconds:g} s (--{flag}-timeout).")
        self.is_total = is_total
        self.stage = "generation" if has_begun else "first_token"


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
            return _unavailable(error, retry_after=error.retry_after)
        case LateError(is_total=False):
            return _unavailable(error, retry_after=1.0)
        case LateError():
            return ErrorAnswer(504, "TimeoutError", str(error))
        case EngineDeadError() | AbortedError():
            return ErrorAnswer(503, "ServiceUnavailableError", str(error))
        case GenerationError():
            return ErrorAnswer(500, "InternalServerError", str(error))
        case HTTPException():
            phrase = http.HTTPStatus(error.status_code).phrase
            return ErrorAnswer(error.status_code, phrase, error.detail, headers=dict(error.headers or {}))
    _log.error("unexpected error while serving a request", exc_info=error)
    return ErrorAnswer(500, "InternalServerError", "internal server error; the server's log has the details.")


def _unavailable(error: Exception, retry_after: float) -> ErrorAnswer:
    seconds = max(1, math.ceil(retry_after))
    return ErrorAnswer(503, "ServiceUnavailableError", str(error), headers={"Retry-After": str(seconds)})


async def handle(request: Request, error: Exception) -> Response:
    """Starlette's exception handler for exceptions that are raised on purpose."""
    return describe(error).response()
