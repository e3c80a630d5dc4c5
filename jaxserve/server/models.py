"""``GET /v1/models``, and the names under which the model is served."""

from __future__ import annotations

import reprlib
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxserve.errors import ModelNotFoundError, nearest
from jaxserve.server.jsonio import respond
from jaxserve.server.protocol import Engine

__all__ = ["ServedModels", "routes"]


_LONGEST_NAME = 256


class ServedModels:
    """The names a request may use; the first one stands for a request that names no model."""

    def __init__(self, engine: Engine, names: tuple[str, ...]) -> None:
        self.names = names or (engine.model_name,)
        self._root = engine.model_name
        self._max_model_len = engine.max_model_len
        self._created = int(time.time())

    def resolve(self, name: str | None) -> str:
        """The name to answer with. ModelNotFoundError: ``name`` is not served."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            short = len(name) <= _LONGEST_NAME  # or megabytes, which are neither compared nor sent back
            shown, hint = (repr(name), nearest(name, self.names)) if short else (reprlib.repr(name), "")
            served = ", ".join(map(repr, self.names))
            raise ModelNotFoundError(f"the model {shown} does not exist; served are: {served}.{hint}", "model")
        return name

    def card(self, name: str) -> dict[str, Any]:
        """The model object of ``name``."""
        return {
            "id": self.resolve(name),
            "object": "model",
            "created": self._created,
            "owned_by": "jaxserve",
            "root": self._root,
            "parent": None,
            "max_model_len": self._max_model_len,
        }


def routes(models: ServedModels) -> list[Route]:
    """Routes of this family."""

    async def list_models(request: Request) -> Response:
        return respond({"object": "list", "data": [models.card(name) for name in models.names]})

    async def get_model(request: Request) -> Response:
        return respond(models.card(request.path_params["name"]))

    return [Route("/v1/models", list_models), Route("/v1/models/{name:path}", get_model)]
