"""``GET /v1/models``, and the names under which the model and its adapters are served."""

from __future__ import annotations

import reprlib
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxserve.errors import ConfigError, ModelNotFoundError, RequestError, nearest
from jaxserve.server.jsonio import respond
from jaxserve.server.protocol import Engine

__all__ = ["ServedModels", "routes"]


_LONGEST_NAME = 256
_MOST_NAMED = 20


class ServedModels:
    """The names a request may use; the first one stands for a request that names no model."""

    def __init__(self, engine: Engine, names: tuple[str, ...]) -> None:
        self.names = names or (engine.model_name,)
        self._root = engine.model_name
        self._max_model_len = engine.max_model_len
        self._created = int(time.time())
        self._adapters = engine.adapters
        taken = sorted(info.name for info in self._adapters.infos() if info.name in self.names)
        if taken:
            raise ConfigError(f"lora_modules: {taken[0]!r} is a name of the base model already.", "lora_modules")

    @property
    def all_names(self) -> tuple[str, ...]:
        """Those of the model, then those of its adapters that are loaded."""
        return (*self.names, *(info.name for info in self._adapters.infos()))

    def check_adapter_name(self, name: str) -> None:
        """RequestError: the name is one of the model's own."""
        if name in self.names:
            raise RequestError(f"lora_name {name!r} is a name of the base model.", "lora_name")

    def adapter(self, name: str) -> str | None:
        """The adapter that a name to answer with stands for, None for the model."""
        return None if name in self.names else name

    def resolve(self, name: str | None) -> str:
        """The name to answer with. ModelNotFoundError: ``name`` is not served."""
        if name is None:
            return self.names[0]
        short = len(name) <= _LONGEST_NAME  # or megabytes, which are neither compared nor sent back
        if name not in self.names and not (short and self._adapters.has(name)):
            known = self.all_names
            shown, hint = (repr(name), nearest(name, known)) if short else (reprlib.repr(name), "")
            served = ", ".join(map(repr, known[:_MOST_NAMED])) + ", …" * (len(known) > _MOST_NAMED)
            raise ModelNotFoundError(f"the model {shown} does not exist; served are: {served}.{hint}", "model")
        return name

    def card(self, name: str) -> dict[str, Any]:
        """The model object of ``name``; that of an adapter names the model as its parent."""
        own = next((info for info in self._adapters.infos() if info.name == name), None)
        return {
            "id": self.resolve(name),
            "object": "model",
            "created": self._created,
            "owned_by": "jaxserve",
            "root": self._root if own is None else own.path,
            "parent": None if name in self.names else self.names[0],
            "max_model_len": self._max_model_len,
        }


def routes(models: ServedModels) -> list[Route]:
    """Routes of this family."""

    async def list_models(request: Request) -> Response:
        return respond({"object": "list", "data": [models.card(name) for name in models.all_names]})

    async def get_model(request: Request) -> Response:
        return respond(models.card(request.path_params["name"]))

    return [Route("/v1/models", list_models), Route("/v1/models/{name:path}", get_model)]
