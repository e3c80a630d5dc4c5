"""``POST /tokenize`` and ``POST /detokenize``: text to token ids as the server sees them, and back."""

from __future__ import annotations

from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxserve.errors import RequestError
from jaxserve.server.jsonio import read_object, respond
from jaxserve.server.models import ServedModels
from jaxserve.server.prompts import prompt_of
from jaxserve.server.protocol import Engine
from jaxserve.server.schema import Body, ChatRequest
from jaxserve.server.turns import Turns

__all__ = ["DetokenizeRequest", "TokenizeRequest", "routes"]


class TokenizeRequest(Body):
    """Body of ``POST /tokenize`` for a text. One with ``messages`` is a chat's, which shapes its own prompt."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """Body of ``POST /detokenize``."""

    model: str | None = None
    tokens: list[int]


def routes(engine: Engine, models: ServedModels, turns: Turns, *, strict: bool) -> list[Route]:
    """Routes of this family; ``strict`` ones refuse parameters that nobody knows."""
    tokenizer = engine.tokenizer

    async def tokenize(request: Request) -> Response:
        given = await read_object(request)
        shows = given.get("return_token_strs")
        body: ChatRequest | TokenizeRequest
        if "messages" in given:
            if shows not in (None, True, False):
                raise RequestError("return_token_strs must be true or false.", "return_token_strs")
            if "prompt" in given:
                raise RequestError("prompt cannot be given together with messages.", "prompt")
            given = {name: value for name, value in given.items() if name != "return_token_strs"}
            body = ChatRequest.parse(given, strict=strict)
            ids = await prompt_of(tokenizer, body, turns.plan(body), engine.max_model_len)
        else:
            body = TokenizeRequest.parse(given, strict=strict)
            ids = await run_in_threadpool(tokenizer.encode, body.prompt, body.add_special_tokens is not False)
        models.resolve(body.model)
        answer: dict[str, Any] = {"count": len(ids), "max_model_len": engine.max_model_len, "tokens": ids}
        if shows:
            answer["token_strs"] = [tokenizer.token_text(token) for token in ids]
        return respond(answer, headers=body.headers)

    async def detokenize(request: Request) -> Response:
        body = DetokenizeRequest.parse(await read_object(request), strict=strict)
        models.resolve(body.model)
        text = await run_in_threadpool(_text, body.tokens)
        return respond({"prompt": text}, headers=body.headers)

    def _text(tokens: list[int]) -> str:
        size = tokenizer.vocab_size
        if (wrong := next((token for token in tokens if not 0 <= token < size), None)) is not None:
            raise RequestError(f"tokens: token id {wrong} is outside the vocabulary (0 to {size - 1}).", "tokens")
        return tokenizer.decode(tokens, skip_special_tokens=False)

    return [
        *(Route(path, tokenize, methods=["POST"]) for path in ("/tokenize", "/v1/tokenize")),
        *(Route(path, detokenize, methods=["POST"]) for path in ("/detokenize", "/v1/detokenize")),
    ]
