"""``/v1/responses``: create, retrieve, cancel, delete, and list what went in."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxserve.errors import RequestError
from jaxserve.metrics import Metrics
from jaxserve.server.errors import describe
from jaxserve.server.exchange import Exchange
from jaxserve.server.jsonio import read_object, respond
from jaxserve.server.models import ServedModels
from jaxserve.server.protocol import Engine
from jaxserve.server.responses.items import Item, as_items
from jaxserve.server.responses.schema import CHAT_NAMES, ResponsesRequest
from jaxserve.server.responses.store import Kept, Run, Store
from jaxserve.server.responses.writer import Told, Writer
from jaxserve.server.sse import NamedEventStream
from jaxserve.server.turns import Turns

__all__ = ["routes"]

_MOST_LISTED = 100


def routes(
    engine: Engine, models: ServedModels, metrics: Metrics, turns: Turns, *, store_size: int, strict: bool
) -> list[Route]:
    """Routes of this family; ``store_size`` responses are kept, and ``strict`` ones refuse unknown parameters."""
    store = Store(store_size)

    async def create(request: Request) -> Response:
        body = ResponsesRequest.parse(await read_object(request), strict=strict)
        model = models.resolve(body.model)
        conversation = [*_before(store, body), *body.input]
        chat = body.chat(conversation)
        job = (f"resp_{uuid.uuid4().hex}", (model, models.adapter(model)))
        work = _Work(await Exchange.open(engine, metrics, turns, chat, job, CHAT_NAMES), body)
        followed = bool(body.background and body.stream)
        kept = Kept(work.writer.response, conversation, _listed(body.input), streams=followed)
        if body.background:
            run = _start(work, kept, store)
            if body.stream:
                return NamedEventStream(run.follow(), headers=body.headers)
            return respond(kept.response, headers=body.headers)
        told = _keeping(work.told(), kept, store if body.store is not False and store_size else None)
        if body.stream:
            return NamedEventStream(told, headers=body.headers)
        async with aclosing(told):
            async for _ in told:
                pass
        return respond(kept.response, headers=body.headers)

    async def retrieve(request: Request) -> Response:
        kept = store.get(request.path_params["id"])
        if request.query_params.get("stream") != "true":
            return respond(kept.response)
        if kept.run is None or not kept.streams:
            raise RequestError("only a response that was created with background and stream can be streamed.", "stream")
        return NamedEventStream(kept.run.follow(_number(request, "starting_after", -1, 0, 2**31) + 1))

    async def cancel(request: Request) -> Response:
        kept = store.get(request.path_params["id"])
        if kept.run is None or kept.run.task is None:
            raise RequestError("only a response that was created with background: true can be cancelled.", "background")
        await _stop(kept)
        return respond(kept.response)

    async def delete(request: Request) -> Response:
        kept = store.remove(request.path_params["id"])
        await _stop(kept)
        return respond({"id": kept.response["id"], "object": "response", "deleted": True})

    async def input_items(request: Request) -> Response:
        return respond(_page(store.get(request.path_params["id"]).input_items, request))

    path = "/v1/responses"
    return [
        Route(path, create, methods=["POST"]),
        Route(path + "/{id}", retrieve, methods=["GET"]),
        Route(path + "/{id}", delete, methods=["DELETE"]),
        Route(path + "/{id}/cancel", cancel, methods=["POST"]),
        Route(path + "/{id}/input_items", input_items, methods=["GET"]),
    ]


class _Work:
    """One response, from the engine's first token to its last event."""

    def __init__(self, exchange: Exchange, body: ResponsesRequest) -> None:
        self.writer = Writer(body, exchange.id, exchange.model)
        self._exchange = exchange
        # Log probabilities are told of text alone: only in small pieces is it known which tokens these are.
        self._stream = bool(body.stream) or body.wants_logprobs

    async def told(self) -> AsyncGenerator[Told, None]:
        """Events. What the engine refuses is raised before the first; later errors are told as the last."""
        writer, exchange = self.writer, self._exchange
        begun = False
        try:
            async with aclosing(exchange.written(stream=self._stream)) as written:
                async for new in written:
                    if not begun:
                        begun = True
                        for event in writer.begin():
                            yield event
                    for event in writer.write(new.events, exchange.logprobs(new.output)):
                        yield event
                    output = new.output
            # Thoughts are tokenised for it, which takes milliseconds if they are long.
            for event in writer.end(output, await asyncio.to_thread(self._usage)):
                yield event
        except Exception as error:
            if not begun:
                raise
            for event in writer.fail(describe(error)):
                yield event

    def _usage(self) -> dict[str, Any]:
        shown = self._exchange.usage.shown()
        thoughts = (item for item in self.writer.response["output"] if item["type"] == "reasoning")
        num_thought = sum(self._exchange.num_tokens(item["content"][0]["text"]) for item in thoughts)
        return {
            "input_tokens": shown["prompt_tokens"],
            "input_tokens_details": {**shown["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": shown["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": min(num_thought, shown["completion_tokens"])},
            "total_tokens": shown["total_tokens"],
        }


async def _keeping(told: AsyncGenerator[Told, None], kept: Kept, store: Store | None) -> AsyncGenerator[Told, None]:
    """The same events; the response is stored before its last one is out."""
    async with aclosing(told):
        async for event in told:
            if store is not None and not kept.unfinished:
                store.put(kept)
            yield event


def _start(work: _Work, kept: Kept, store: Store) -> Run:
    """Have a response written in the background."""
    kept.run = run = Run()
    tell = run.tell if kept.streams else lambda event: None
    first = list(work.writer.queue())
    store.put(kept)

    async def write() -> None:
        try:
            for event in first:
                tell(event)
            try:
                async with aclosing(work.told()) as told:
                    async for event in told:
                        tell(event)
            except Exception as error:
                for event in work.writer.fail(describe(error)):
                    tell(event)
            store.put(kept)
        except asyncio.CancelledError:
            work.writer.cancel()
        finally:
            run.end()

    run.task = asyncio.create_task(write())
    return run


async def _stop(kept: Kept) -> None:
    if kept.run is not None and kept.run.task is not None and kept.unfinished:
        kept.run.task.cancel()
        await asyncio.wait({kept.run.task})


def _before(store: Store, body: ResponsesRequest) -> list[Item]:
    """The conversation that a request goes on from."""
    if body.previous_response_id is None:
        return []
    kept = store.get(body.previous_response_id)
    if kept.unfinished:
        raise RequestError("previous_response_id names a response that is still being written.", "previous_response_id")
    # A call that was cut off may have no arguments, and can have no result.
    whole = [
        item for item in kept.response["output"] if item["type"] != "function_call" or item["status"] == "completed"
    ]
    return [*kept.conversation, *as_items(whole)]


def _listed(items: list[Item]) -> list[dict[str, Any]]:
    return [{**item.model_dump(exclude_none=True), "id": item.id or f"item_{uuid.uuid4().hex}"} for item in items]


def _page(items: list[dict[str, Any]], request: Request) -> dict[str, Any]:
    """Items newest first (or with ``order=asc``), at most ``limit``, those behind ``after``."""
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RequestError("order must be asc or desc.", "order")
    limit = _number(request, "limit", 20, 1, _MOST_LISTED)
    ordered = items if order == "asc" else items[::-1]
    if (after := request.query_params.get("after")) is not None:
        place = next((i for i, item in enumerate(ordered) if item["id"] == after), None)
        if place is None:
            raise RequestError("after names no item of this response.", "after")
        ordered = ordered[place + 1 :]
    data = ordered[:limit]
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return {"object": "list", "data": data, "has_more": len(ordered) > limit, **ends}


def _number(request: Request, name: str, default: int, low: int, high: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal()) or len(text) > 10 or not low <= int(text) <= high:
        raise RequestError(f"{name} must be an integer from {low} to {high}.", name)
    return int(text)
