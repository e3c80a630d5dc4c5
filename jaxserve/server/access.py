"""Who may ask what: keys of clients, keys of operators, and how much one key may have under way.

Only the paths that tell whether the server lives are open to everybody, and the files of the page. A browser sends no
key by itself, so ``/`` answers who has none with that page, as a refusal, and the page asks for one. What controls the
server for all needs a key of an operator where there are any; such a key is good for all else too.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxserve.server.errors import ErrorAnswer
from jaxserve.server.ui import FILES, locked

__all__ = ["Access", "Keys", "held", "route_path"]

_HOLD = "jaxserve.hold"  # in a request's scope

_OPEN_PATHS = frozenset({"/health", "/ping", "/ready"})
_CONTROL_PATHS = frozenset(
    {
        "/abort",
        "/pause",
        "/reset_prefix_cache",
        "/resume",
        "/start_profile",
        "/stop_profile",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    }
)


class Keys:
    """A set of keys, of which only digests are kept."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def find(self, digest: bytes) -> int | None:
        """The number of the key with this digest, None if there is none. All are compared, each in constant time."""
        found = None
        for number, known in enumerate(self._digests):
            if hmac.compare_digest(digest, known):
                found = number
        return found


class Access:
    """Lets in whom the keys allow; without keys, everybody.

    A key with ``max_concurrency`` requests under way gets 429 for more; 0 is no limit. Operators have none. Requests
    that ask for no work (a GET, or to end a response that is written in the background) are not counted, nor refused.
    ``ui`` tells whether there is a page.
    """

    def __init__(self, app: ASGIApp, clients: Keys, operators: Keys, max_concurrency: int, ui: bool) -> None:
        self._app = app
        self._clients = clients
        self._operators = operators
        self._max_concurrency = max_concurrency
        self._ui = ui
        self._under_way: Counter[int] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = route_path(scope) if scope["type"] == "http" else None
        if path is None or self._is_open(path) or not (self._clients or self._operators):
            await self._app(scope, receive, send)
            return
        digest = _digest(_given(Headers(scope=scope)))
        if self._operators.find(digest) is not None:
            await self._app(scope, receive, send)
            return
        client = self._clients.find(digest)
        # A route's pattern also matches a path with a newline behind it.
        controls = path.rstrip("/\n") in _CONTROL_PATHS
        works = scope["method"] == "POST" and not path.endswith("/cancel")
        refusal = self._refusal(client, controls=controls, works=works)
        if refusal is not None and refusal.status == 401 and self._ui and path == "/":
            await locked(refusal.headers)(scope, receive, send)
        elif refusal is not None:
            await refusal.response()(scope, receive, send)
        elif client is None or not works:
            await self._app(scope, receive, send)
        else:
            scope[_HOLD] = partial(self._counted, client)
            with self._counted(client):
                await self._app(scope, receive, send)

    @contextmanager
    def _counted(self, client: int) -> Iterator[None]:
        self._under_way[client] += 1
        try:
            yield
        finally:
            self._under_way[client] -= 1

    def _is_open(self, path: str) -> bool:
        return path in _OPEN_PATHS or (self._ui and path.startswith(FILES))

    def _refusal(self, client: int | None, *, controls: bool, works: bool) -> ErrorAnswer | None:
        needed = bool(self._clients) or (controls and bool(self._operators))
        if client is None and needed:
            return ErrorAnswer(
                401,
                "AuthenticationError",
                "a valid API key is needed: send the header 'Authorization: Bearer KEY'.",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if controls and self._operators:
            return ErrorAnswer(403, "PermissionDeniedError", "this needs a key of an operator (--admin-api-key).")
        if works and client is not None and 0 < self._max_concurrency <= self._under_way[client]:
            message = f"this key has {self._under_way[client]} requests under way; the limit is {self._max_concurrency}"
            message += " (--max-concurrency-per-key)."
            return ErrorAnswer(429, "RateLimitError", message, headers={"Retry-After": "1"})
        return None


def held(scope: Scope) -> AbstractContextManager[None]:
    """While this is entered, the work of a request counts as under way, though it may have its answer."""
    hold: AbstractContextManager[None] = scope.get(_HOLD, nullcontext)()
    return hold


def route_path(scope: Scope) -> str:
    """The path without that under which a proxy shows the server."""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


def _given(headers: Headers) -> bytes:
    """The key of a request, empty if it has none; Anthropic's clients have a header of their own for it."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip().encode("latin-1")
    return headers.get("x-api-key", "").encode("latin-1")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
