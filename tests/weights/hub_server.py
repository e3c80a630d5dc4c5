"""A stand-in for the Hugging Face hub: as much of its HTTP interface as a download needs, over a local port."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlparse

SHA = "0123456789abcdef0123456789abcdef01234567"


class HubServer:
    """Models by name, each a mapping of file name to content; ``gated`` ones answer 403.

    ``sent`` lists the files that were downloaded.
    """

    def __init__(self) -> None:
        self.models: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.sent: list[str] = []
        self.url = ""


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = [unquote(part) for part in urlparse(self.path).path.strip("/").split("/")]
        api = parts[:2] == ["api", "models"]
        parts = parts[2:] if api else parts
        repo, rest = "/".join(parts[:2]), parts[2:]
        if repo in self.hub.gated:
            return self._answer(403, b"", {"X-Error-Code": "GatedRepo"})
        if repo not in self.hub.models:
            return self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        files = self.hub.models[repo]
        if len(rest) > 1 and rest[1] not in ("main", SHA):
            return self._answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        if not api:
            return self._send_file(files, "/".join(rest[2:]))
        if rest and rest[0] == "tree":
            listed = [{"type": "file", "path": n, "size": len(c), "oid": _etag(c)} for n, c in files.items()]
            return self._answer(200, json.dumps(listed).encode())
        info = {"id": repo, "modelId": repo, "sha": SHA, "siblings": [{"rfilename": n} for n in files]}
        return self._answer(200, json.dumps(info).encode())

    def _send_file(self, files: dict[str, bytes], name: str) -> None:
        if name not in files:
            return self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        if self.command == "GET":
            self.hub.sent.append(name)
        return self._answer(200, files[name], {"ETag": f'"{_etag(files[name])}"', "X-Repo-Commit": SHA})

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serve() -> Iterator[HubServer]:
    """Run a stand-in on a free port."""
    hub = HubServer()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
