"""``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxserve.errors import RequestError
from jaxserve.metrics import Metrics
from jaxserve.server.anthropic.dialect import error_body
from jaxserve.server.anthropic.schema import CHAT_NAMES, CountRequest, MessagesRequest
from jaxserve.server.anthropic.writer import Told, Writer
from jaxserve.server.errors import describe
from jaxserve.server.exchange import Exchange
from jaxserve.server.jsonio import read_object, respond
from jaxserve.server.models import ServedModels
from jaxserve.server.prompts import prompt_of
from jaxserve.server.protocol import Engine
from jaxserve.server.sse import NamedEventStream
from jaxserve.server.turns import Turns

__all__ = ["routes"]


def routes(engine: Engine, models: ServedModels, metrics: Metrics, turns: Turns, *, strict: bool) -> list[Route]:
    """Routes of this family; ``strict`` ones refuse parameters that nobody knows."""
    template = engine.tokenizer.chat_template

    async def create(request: Request) -> Response:
        body = MessagesRequest.parse(await read_object(request), strict=strict)
        model = models.resolve(body.model)
        if body.thinking is not None and body.thinking.type == "enabled" and not turns.reasons:
            raise RequestError("thinking needs a server with --reasoning-parser.", "thinking")
        job = (f"msg_{uuid.uuid4().hex}", (model, models.adapter(model)))
        exchange = await Exchange.open(engine, metrics, turns, body.chat(template), job, CHAT_NAMES)
        writer = Writer(exchange.id, model)
        told = _told(exchange, writer, stream=bool(body.stream))
        if body.stream:
            return _MessageStream(told, headers=body.headers)
        async with aclosing(told):
            async for _ in told:
                pass
        return respond(writer.message, headers=body.headers)

    async def count_tokens(request: Request) -> Response:
        body = CountRequest.parse(await read_object(request), strict=strict)
        models.resolve(body.model)
        chat = body.chat(template)
        prompt = await prompt_of(engine.tokenizer, chat, turns.plan(chat), engine.max_model_len)
        return respond({"input_tokens": len(prompt)}, headers=body.headers)

    return [
        Route("/v1/messages", create, methods=["POST"]),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    ]


class _MessageStream(NamedEventStream):
    def explain(self, error: Exception) -> Told:
        answer = describe(error)
        return error_body(answer.status, answer.message)


async def _told(exchange: Exchange, writer: Writer, *, stream: bool) -> AsyncGenerator[Told, None]:
    begun = False
    async with aclosing(exchange.written(stream=stream)) as written:
        async for new in written:
            if not begun:
                begun = True
                for event in writer.begin(_usage(exchange)):
                    yield event
            for event in writer.write(new.events):
                yield event
            output = new.output
    for event in writer.end(output, _usage(exchange)):
        yield event


def _usage(exchange: Exchange) -> dict[str, Any]:
    """Cached tokens are no part of ``input_tokens`` here."""
    shown = exchange.usage.shown()
    cached = shown["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": shown["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": shown["completion_tokens"],
    }
