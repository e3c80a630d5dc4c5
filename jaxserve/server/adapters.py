"""Adapters while the server runs: ``POST /v1/load_lora_adapter``, ``POST /v1/unload_lora_adapter`` (names, bodies and
answers as vLLM has them) and ``GET /v1/lora_adapters``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Self

from anyio import CapacityLimiter, to_thread
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from jaxserve.errors import LoadError, MissingFileError, ModelNotFoundError, RequestError
from jaxserve.outputs import AdapterInfo
from jaxserve.server.compatibility import strip
from jaxserve.server.jsonio import read_object, respond
from jaxserve.server.models import ServedModels
from jaxserve.server.protocol import Engine
from jaxserve.server.schema import explain

__all__ = ["routes"]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    lora_name: str = Field(min_length=1)

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """The request in ``body``. RequestError: a parameter is unknown, missing, or of the wrong type."""
        try:
            kept, _ = strip(body, cls.model_fields, {}, strict=True)
            return cls.model_validate(kept)
        except ValidationError as error:
            raise explain(error) from None


class _Load(_Body):
    lora_path: str = Field(min_length=1)
    base_model_name: str | None = None
    load_inplace: bool = False


class _Unload(_Body):
    wait: bool = False
    timeout: float = Field(60.0, ge=0.0, le=3600.0)


def routes(engine: Engine, models: ServedModels) -> list[Route]:
    """Routes of this family."""
    # Of their own: a slow hub, or requests that end late, must not take the threads of other endpoints.
    loading, unloading = CapacityLimiter(2), CapacityLimiter(16)

    async def load(request: Request) -> Response:
        body = _Load.parse(await read_object(request))
        models.check_adapter_name(body.lora_name)
        try:
            work = partial(engine.adapters.load, base_model=body.base_model_name, replace=body.load_inplace)
            await to_thread.run_sync(work, body.lora_name, body.lora_path, limiter=loading)
        except MissingFileError as error:
            raise ModelNotFoundError(str(error), "lora_path") from error
        except LoadError as error:
            raise RequestError(str(error), "lora_path") from error
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(request: Request) -> Response:
        body = _Unload.parse(await read_object(request))
        work = partial(engine.adapters.unload, wait=body.timeout if body.wait else None)
        await to_thread.run_sync(work, body.lora_name, limiter=unloading)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def listed(request: Request) -> Response:
        adapters = engine.adapters
        shown = [_shown(info) for info in adapters.infos()]
        return respond(
            {"object": "list", "data": shown, "slots": adapters.num_slots, "slots_bytes": adapters.num_bytes}
        )

    return [
        Route("/v1/load_lora_adapter", load, methods=["POST"]),
        Route("/v1/unload_lora_adapter", unload, methods=["POST"]),
        Route("/v1/lora_adapters", listed),
    ]


def _shown(info: AdapterInfo) -> dict[str, Any]:
    return {
        "object": "lora_adapter",
        "lora_name": info.name,
        "lora_path": info.path,
        "base_model_name": info.base_model,
        "content": info.key,
        "rank": info.rank,
        "targets": list(info.targets),
        "bytes": info.num_bytes,
        "in_host_memory": info.in_host,
        "slot": info.slot,
        "num_requests": info.num_requests,
    }
