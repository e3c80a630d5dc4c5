"""``POST /tokenize`` and ``POST /detokenize``: text to token ids as the server sees them, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxserve.errors import RequestError
from jaxserve.server.bodies import Rules
from jaxserve.server.intake import Intake
from jaxserve.server.jsonio import dumps, parse_object
from jaxserve.server.models import ServedModels
from jaxserve.server.prompts import chat_prompt
from jaxserve.server.schema import Body, ChatRequest

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


def routes(models: ServedModels, intake: Intake) -> list[Route]:
    """Routes of this family. What they answer with is as long as what they are asked: both are made elsewhere."""

    async def tokenize(request: Request) -> Response:
        return _answer(await intake.compute(request, _tokenized))

    async def detokenize(request: Request) -> Response:
        return _answer(await intake.compute(request, _detokenized))

    def _answer(made: _Made) -> Response:
        models.resolve(made.model)
        return Response(made.answer, headers=made.headers, media_type="application/json")

    return [
        *(Route(path, tokenize, methods=["POST"]) for path in ("/tokenize", "/v1/tokenize")),
        *(Route(path, detokenize, methods=["POST"]) for path in ("/detokenize", "/v1/detokenize")),
    ]


class _Made(NamedTuple):
    """An answer, and for whom: the model that the request names."""

    model: str | None
    headers: dict[str, str]
    answer: bytes


def _tokenized(rules: Rules, data: bytes) -> _Made:
    given, strict, tokenizer = parse_object(data), rules.config.strict_params, rules.tokenizer
    shows = given.get("return_token_strs")
    body: ChatRequest | TokenizeRequest
    ids: Sequence[int]
    if "messages" in given:
        if shows not in (None, True, False):
            raise RequestError("return_token_strs must be true or false.", "return_token_strs")
        if "prompt" in given:
            raise RequestError("prompt cannot be given together with messages.", "prompt")
        given = {name: value for name, value in given.items() if name != "return_token_strs"}
        body = ChatRequest.parse(given, strict=strict)
        ids = chat_prompt(tokenizer, body, rules.turns.plan(body), rules.max_model_len)
    else:
        body = TokenizeRequest.parse(given, strict=strict)
        ids = tokenizer.encode(body.prompt, body.add_special_tokens is not False)
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": rules.max_model_len, "tokens": ids}
    if shows:
        answer["token_strs"] = [tokenizer.token_text(token) for token in ids]
    return _Made(body.model, body.headers, dumps(answer))


def _detokenized(rules: Rules, data: bytes) -> _Made:
    body = DetokenizeRequest.parse(parse_object(data), strict=rules.config.strict_params)
    size = rules.tokenizer.vocab_size
    if (wrong := next((token for token in body.tokens if not 0 <= token < size), None)) is not None:
        raise RequestError(f"tokens: token id {wrong} is outside the vocabulary (0 to {size - 1}).", "tokens")
    text = rules.tokenizer.decode(body.tokens, skip_special_tokens=False)
    return _Made(body.model, body.headers, dumps({"prompt": text}))
