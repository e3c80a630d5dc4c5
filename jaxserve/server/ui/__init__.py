"""The page at ``/``: chat, live view and calculator, static files of the package under ``/ui``.

The files tell nothing of the server, so they are open to everybody; what they show is asked from routes that are
guarded, with a key that the page asks for. All its addresses are relative, so that a proxy may show it anywhere.
Whatever a model says ends up in a page of this origin, beside a key: the policy lets the page load its own scripts and
nothing else, and lets no string become HTML but through the sanitizer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

__all__ = ["FILES", "locked", "routes"]

FILES = "/ui/"
"""Where everything lies that the page consists of."""

_TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "mjs": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}

_HEADERS = {
    # Asked again every time, answered with 304: a new version of the server must not meet scripts of the old one.
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


@dataclass(frozen=True)
class _File:
    content: bytes
    media_type: str
    etag: str

    def answer(self, request: Request) -> Response:
        headers = {**_HEADERS, "ETag": self.etag}
        if self.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=headers, media_type=self.media_type)


def routes() -> list[Route]:
    """Routes of this family."""

    async def index(request: Request) -> Response:
        return _files()["index.html"].answer(request)

    async def asset(request: Request) -> Response:
        name = request.path_params["name"]
        file = _files().get(name)
        if file is None or name == "index.html":
            raise HTTPException(404)
        return file.answer(request)

    return [Route("/", index), Route(FILES + "{name:path}", asset)]


def locked(headers: Mapping[str, str]) -> Response:
    """What ``/`` answers who has no key: the page, as a refusal with these headers."""
    file = _files()["index.html"]
    return Response(file.content, 401, {**_HEADERS, **headers}, file.media_type)


@cache
def _files() -> dict[str, _File]:
    """All files by their path under ``assets``; what is not in here cannot be asked for, however a path is written."""
    found: dict[str, _File] = {}

    def walk(folder: Traversable, prefix: str) -> None:
        for entry in folder.iterdir():
            if entry.is_dir():
                walk(entry, f"{prefix}{entry.name}/")
            elif (media_type := _TYPES.get(entry.name.rpartition(".")[2])) is not None:
                content = entry.read_bytes()
                etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
                found[prefix + entry.name] = _File(content, media_type, etag)

    walk(resources.files(__name__).joinpath("assets"), "")
    return found
