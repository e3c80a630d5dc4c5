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
from jaxserve.server.bodies import Rules, check_rest, packed_chat
from jaxserve.server.errors import describe
from jaxserve.server.exchange import Exchange, named_as
from jaxserve.server.intake import Intake
from jaxserve.server.jsonio import parse_object, respond
from jaxserve.server.models import ServedModels
from jaxserve.server.prompts import chat_prompt
from jaxserve.server.protocol import Engine
from jaxserve.server.schema import ChatRequest
from jaxserve.server.sse import NamedEventStream

__all__ = ["routes"]


def routes(engine: Engine, models: ServedModels, metrics: Metrics, intake: Intake) -> list[Route]:
    """Routes of this family."""
    turns = intake.rules.turns

    async def create(request: Request) -> Response:
        body, chat = await intake.read(request, _read, _read_large)
        model = models.resolve(body.model)
        if body.thinking is not None and body.thinking.type == "enabled" and not turns.reasons:
            raise RequestError("thinking needs a server with --reasoning-parser.", "thinking")
        job = (f"msg_{uuid.uuid4().hex}", (model, models.adapter(model)))
        exchange = await Exchange.open(engine, metrics, turns, chat, job, CHAT_NAMES)
        writer = Writer(exchange.id, model)
        told = _told(exchange, writer, stream=bool(body.stream))
        if body.stream:
            return _MessageStream(told, headers=body.headers)
        async with aclosing(told):
            async for _ in told:
                pass
        return respond(writer.message, headers=body.headers)

    async def count_tokens(request: Request) -> Response:
        model, headers, num_tokens = await intake.compute(request, _count)
        models.resolve(model)
        return respond({"input_tokens": num_tokens}, headers=headers)

    return [
        Route("/v1/messages", create, methods=["POST"]),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    ]


def _read(rules: Rules, data: bytes) -> tuple[MessagesRequest, ChatRequest]:
    body = MessagesRequest.parse(parse_object(data), strict=rules.config.strict_params)
    return body, body.chat(rules.tokenizer.chat_template)


def _read_large(rules: Rules, data: bytes) -> tuple[MessagesRequest, ChatRequest]:
    body, chat = _read(rules, data)
    rest = body.model_copy(update={"messages": [], "system": None, "tools": None})
    check_rest(rest)
    with named_as(CHAT_NAMES):
        return rest, packed_chat(rules, chat)


def _count(rules: Rules, data: bytes) -> tuple[str | None, dict[str, str], int]:
    body = CountRequest.parse(parse_object(data), strict=rules.config.strict_params)
    chat = body.chat(rules.tokenizer.chat_template)
    prompt = chat_prompt(rules.tokenizer, chat, rules.turns.plan(chat), rules.max_model_len)
    return body.model, body.headers, len(prompt)


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
