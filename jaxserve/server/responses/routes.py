"""``/v1/responses``: create, retrieve, cancel, delete, and list what went in."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractContextManager, ExitStack, aclosing
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxserve.errors import RequestError
from jaxserve.metrics import Metrics
from jaxserve.server.access import held
from jaxserve.server.bodies import Rules, check_rest, packed_chat
from jaxserve.server.errors import describe
from jaxserve.server.exchange import Exchange, named_as
from jaxserve.server.intake import Intake
from jaxserve.server.jsonio import dumps, parse_object, respond
from jaxserve.server.models import ServedModels
from jaxserve.server.protocol import Engine
from jaxserve.server.responses.items import as_json, from_json
from jaxserve.server.responses.schema import CHAT_NAMES, ResponsesRequest
from jaxserve.server.responses.store import Kept, Run, Store
from jaxserve.server.responses.writer import Told, Writer
from jaxserve.server.schema import ChatRequest
from jaxserve.server.sse import NamedEventStream

__all__ = ["routes"]

_MOST_LISTED = 100


def routes(engine: Engine, models: ServedModels, metrics: Metrics, intake: Intake) -> list[Route]:
    """Routes of this family."""
    turns, store_size = intake.rules.turns, intake.rules.config.max_stored_responses
    store = Store(store_size)

    async def create(request: Request) -> Response:
        body, given = await intake.read(request, _read, _read_large)
        body.store = body.store is not False and store_size > 0
        model = models.resolve(body.model)
        conversation = (*_before(store, body), given)
        chat = await intake.make(_array(conversation), partial(_chat, body), partial(_large_chat, body))
        job = (f"resp_{uuid.uuid4().hex}", (model, models.adapter(model)))
        work = _Work(await Exchange.open(engine, metrics, turns, chat, job, CHAT_NAMES), body)
        kept = Kept(work.writer.response, conversation, streams=bool(body.background and body.stream))
        if body.background:
            run = _start(work, kept, store, held(request.scope))
            if body.stream:
                return NamedEventStream(run.follow(), headers=body.headers)
            return respond(kept.response, headers=body.headers)
        told = _keeping(work.told(), kept, store if body.store else None)
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
        items = store.get(request.path_params["id"]).conversation[-1]
        query = partial(_page, _Query.of(request))
        return Response(await intake.make([items], query, query), media_type="application/json")

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


def _start(work: _Work, kept: Kept, store: Store, hold: AbstractContextManager[None]) -> Run:
    """Have a response written in the background, which counts as under way (``hold``) until it is."""
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

    counted = ExitStack()
    counted.enter_context(hold)
    run.task = asyncio.create_task(write())
    run.task.add_done_callback(lambda _: counted.close())
    return run


async def _stop(kept: Kept) -> None:
    if kept.run is not None and kept.run.task is not None and kept.unfinished:
        kept.run.task.cancel()
        await asyncio.wait({kept.run.task})


def _before(store: Store, body: ResponsesRequest) -> list[bytes]:
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
    return [*kept.conversation, dumps(whole)]


def _array(parts: Sequence[bytes]) -> list[bytes]:
    """The pieces of a JSON array."""
    commas = (b"," for _ in parts[1:])
    return [b"[", *(piece for pair in zip_longest(parts, commas, fillvalue=b"") for piece in pair), b"]"]


def _read(rules: Rules, data: bytes) -> tuple[ResponsesRequest, bytes]:
    """A request without its input, and that as JSON."""
    body = ResponsesRequest.parse(parse_object(data), strict=rules.config.strict_params)
    return body.model_copy(update={"input": []}), as_json(body.input)


def _read_large(rules: Rules, data: bytes) -> tuple[ResponsesRequest, bytes]:
    body, given = _read(rules, data)
    check_rest(body)
    return body, given


def _chat(body: ResponsesRequest, rules: Rules, conversation: bytes) -> ChatRequest:
    return body.chat(from_json(conversation))


def _large_chat(body: ResponsesRequest, rules: Rules, conversation: bytes) -> ChatRequest:
    with named_as(CHAT_NAMES):
        return packed_chat(rules, _chat(body, rules, conversation))


class _Query(NamedTuple):
    """Which items are listed: newest first (or with the order asc), at most ``limit``, those behind ``after``."""

    order: str
    limit: int
    after: str | None

    @classmethod
    def of(cls, request: Request) -> _Query:
        order = request.query_params.get("order", "desc")
        if order not in ("asc", "desc"):
            raise RequestError("order must be asc or desc.", "order")
        return cls(order, _number(request, "limit", 20, 1, _MOST_LISTED), request.query_params.get("after"))


def _page(query: _Query, rules: Rules, items: bytes) -> bytes:
    ordered = json.loads(items)[:: 1 if query.order == "asc" else -1]
    if query.after is not None:
        place = next((i for i, item in enumerate(ordered) if item["id"] == query.after), None)
        if place is None:
            raise RequestError("after names no item of this response.", "after")
        ordered = ordered[place + 1 :]
    data = ordered[: query.limit]
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return dumps({"object": "list", "data": data, "has_more": len(ordered) > query.limit, **ends})


def _number(request: Request, name: str, default: int, low: int, high: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal()) or len(text) > 10 or not low <= int(text) <= high:
        raise RequestError(f"{name} must be an integer from {low} to {high}.", name)
    return int(text)
