"""What changes the server for all, and tells how it runs: pause, resume, abort, the prefix cache, its settings."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxserve import __version__
from jaxserve.errors import RequestError
from jaxserve.server.errors import NotFoundError
from jaxserve.server.jsonio import read_object, respond
from jaxserve.server.live_events import answer_id
from jaxserve.server.protocol import Engine
from jaxserve.server.schema import Body

__all__ = ["AbortRequest", "routes"]


class AbortRequest(Body):
    """Body of ``POST /abort``: the ids of answers, as their streams tell them, or all."""

    request_ids: list[str] | None = Field(None, min_length=1)
    all: bool | None = None


def routes(engine: Engine) -> list[Route]:
    """Routes of this family."""

    async def ready(request: Request) -> Response:
        engine.check_health()
        status = "paused" if engine.is_paused else "ready"
        return respond({"status": status}, 200 if status == "ready" else 503)

    async def server_info(request: Request) -> Response:
        answer: dict[str, Any] = {
            "version": __version__,
            "model": engine.model_name,
            "max_model_len": engine.max_model_len,
            "is_paused": engine.is_paused,
            "config": asdict(engine.config),
        }
        return respond(answer)

    async def reset_prefix_cache(request: Request) -> Response:
        done = await engine.reset_prefix_cache()
        why = {} if done else {"message": "requests are running, whose blocks are in use; pause first."}
        return respond({"success": done, **why}, 200 if done else 409)

    async def pause(request: Request) -> Response:
        await engine.pause(request.query_params.get("mode", "abort"))
        return respond({"is_paused": True})

    async def resume(request: Request) -> Response:
        await engine.resume()
        return respond({"is_paused": False})

    async def is_paused(request: Request) -> Response:
        return respond({"is_paused": engine.is_paused})

    async def abort(request: Request) -> Response:
        body = AbortRequest.parse(await read_object(request), strict=True)
        if bool(body.all) == (body.request_ids is not None):
            raise RequestError("give either request_ids or all: true.", "request_ids")
        wanted = set(body.request_ids or ())
        found: dict[str, None] = {}
        for open_id in engine.open_requests():
            answer = answer_id(open_id)
            if body.all or answer in wanted:
                found[answer] = None
                await engine.abort(open_id)
        if wanted and not found:
            raise NotFoundError("none of the request_ids is being answered.", "request_ids")
        return respond({"aborted": list(found)})

    return [
        Route("/ready", ready),
        Route("/server_info", server_info),
        Route("/is_paused", is_paused),
        *(
            Route(f"/{endpoint.__name__}", endpoint, methods=["POST"])
            for endpoint in (reset_prefix_cache, pause, resume, abort)
        ),
    ]
