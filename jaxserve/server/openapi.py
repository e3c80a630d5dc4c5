"""``GET /openapi.json`` and ``GET /docs``: what can be asked, as data and as a page that needs no network."""

from __future__ import annotations

import html
from collections.abc import Sequence
from functools import cache
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from jaxserve import __version__
from jaxserve.server.anthropic.schema import CountRequest, MessagesRequest
from jaxserve.server.control import AbortRequest
from jaxserve.server.embeddings import EmbeddingRequest
from jaxserve.server.jsonio import respond
from jaxserve.server.responses.schema import ResponsesRequest
from jaxserve.server.schema import ChatRequest, CompletionRequest
from jaxserve.server.scores import RerankRequest, ScoreRequest
from jaxserve.server.tokens import DetokenizeRequest, TokenizeRequest

__all__ = ["document", "routes"]

_BODIES: dict[str, type[BaseModel]] = {
    "/abort": AbortRequest,
    "/detokenize": DetokenizeRequest,
    "/tokenize": TokenizeRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountRequest,
    "/v1/rerank": RerankRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/score": ScoreRequest,
}

_SUMMARIES = {
    "/abort": "End answers that are being given",
    "/debug/live": "Blocks, requests and steps as they change: events for as long as somebody looks",
    "/debug/requests": "Requests by state",
    "/debug/requests/{id}": "What became of a request, and what took its time",
    "/detokenize": "Token ids to text",
    "/docs": "This page",
    "/health": "Whether the engine lives",
    "/is_paused": "Whether new requests wait",
    "/metrics": "Prometheus metrics",
    "/openapi.json": "What can be asked, as data",
    "/pause": "Let new requests wait; running ones end, or with ?mode=wait finish, or with ?mode=keep stand still",
    "/ping": "Whether the engine lives",
    "/ready": "Whether requests are served now",
    "/reset_prefix_cache": "Forget all cached prefixes",
    "/resume": "Go on after a pause",
    "/server_info": "Version and settings",
    "/tokenize": "Text or a chat to token ids",
    "/v1/chat/completions": "Answer a chat (OpenAI)",
    "/v1/completions": "Go on with a text (OpenAI)",
    "/v1/embeddings": "Texts as vectors (OpenAI)",
    "/v1/messages": "Answer messages (Anthropic)",
    "/v1/messages/count_tokens": "How many tokens messages have (Anthropic)",
    "/v1/models": "What is served",
    "/v1/models/{name}": "One model",
    "/v1/rerank": "Rank documents by how likely a query is after each",
    "/v1/responses": "Give a response (OpenAI)",
    "/v1/responses/{id}": "A stored response",
    "/v1/responses/{id}/cancel": "End a response in the background",
    "/v1/responses/{id}/input_items": "What a stored response was asked",
    "/v1/score": "How likely texts are after others",
    "/version": "The version",
}


def routes(others: Sequence[Route]) -> list[Route]:
    """Routes of this family, which describe the ``others`` and themselves."""
    own: list[Route] = []

    @cache
    def described() -> dict[str, Any]:
        return document([*others, *own])

    async def openapi(request: Request) -> Response:
        return respond(described())

    async def docs(request: Request) -> Response:
        return HTMLResponse(_page(described()))

    own += [Route("/openapi.json", openapi), Route("/docs", docs)]
    return own


def document(described: Sequence[Route]) -> dict[str, Any]:
    """The OpenAPI document of routes. Other names of a path point to it by what they say."""
    paths: dict[str, dict[str, Any]] = {}
    schemas: dict[str, Any] = {}
    for route in described:
        path = route.path.replace(":path}", "}")
        known = path if path in _SUMMARIES else _first_name(path)
        for method in sorted((route.methods or set()) - {"HEAD"}):
            operation: dict[str, Any] = {
                "summary": _SUMMARIES.get(known, path),
                "operationId": f"{method.lower()}_{path.strip('/').replace('/', '_')}",
                "parameters": [_parameter(part) for part in path.split("/") if part.startswith("{")],
                "responses": {"200": {"description": "the answer"}, "400": {"description": "what is wrong"}},
            }
            if method == "POST" and (body := _BODIES.get(known)) is not None:
                reference = {"$ref": f"#/components/schemas/{body.__name__}"}
                operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference}}}
                schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
                schemas |= schema.pop("$defs", {})
                schemas[body.__name__] = schema
            paths.setdefault(path, {})[method.lower()] = operation
    info = {"title": "jaxserve", "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas}}


def _first_name(path: str) -> str:
    """The name under which an alias is described."""
    tail = path.removeprefix("/v1").removeprefix("/v2")
    return next((name for name in (tail, "/v1" + tail) if name in _SUMMARIES), path)


def _parameter(part: str) -> dict[str, Any]:
    return {"name": part.strip("{}"), "in": "path", "required": True, "schema": {"type": "string"}}


_STYLE = (
    "body{font:15px sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "code{font-size:14px}td{padding:.1em 1em .1em 0}"
)


def _page(described: dict[str, Any]) -> str:
    sections = []
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            rows = ""
            if (body := operation.get("requestBody")) is not None:
                name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
                schema = described["components"]["schemas"][name]
                rows = "".join(_row(field, about, schema) for field, about in schema["properties"].items())
            title = (
                f"<h3><code>{method.upper()} {html.escape(path)}</code></h3><p>{html.escape(operation['summary'])}</p>"
            )
            sections.append(f"{title}<table>{rows}</table>" if rows else title)
    head = (
        f"<title>jaxserve</title><style>{_STYLE}</style><h1>jaxserve {html.escape(described['info']['version'])}</h1>"
    )
    return f'<!doctype html><html lang="en"><meta charset="utf-8">{head}{"".join(sections)}</html>'


def _row(field: str, about: dict[str, Any], schema: dict[str, Any]) -> str:
    needed = " (needed)" if field in schema.get("required", ()) else ""
    return f"<tr><td><code>{html.escape(field)}</code>{needed}</td><td>{html.escape(_type(about))}</td></tr>"


def _type(about: dict[str, Any]) -> str:
    """A type in a few words."""
    if "$ref" in about:
        return str(about["$ref"]).rpartition("/")[2]
    if options := about.get("anyOf") or about.get("oneOf"):
        return " or ".join(dict.fromkeys(_type(option) for option in options if option.get("type") != "null"))
    if "enum" in about:
        return " or ".join(map(str, about["enum"]))
    kind = str(about.get("type", "any"))
    return f"list of {_type(about.get('items', {}))}" if kind == "array" else kind
