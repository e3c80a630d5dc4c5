"""A process that listens with TLS or on a Unix socket, and what it logs."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from jaxserve.config import ServerConfig
from jaxserve.errors import ConfigError, JaxserveError
from jaxserve.server import bind
from jaxserve.server.listening import Certificate

CERTIFICATES = Path(__file__).with_name("certificates")
Start = Callable[..., tuple[subprocess.Popen[str], str]]


def trusting(name: str, client: str | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(CERTIFICATES / f"{name}.crt"))
    if client is not None:
        context.load_cert_chain(CERTIFICATES / f"{client}.crt", CERTIFICATES / f"{client}.key")
    return context


def test_tls_with_certificates_of_clients_and_a_new_one_of_the_server(start: Start, tmp_path: Path) -> None:
    for end in ("crt", "key"):
        shutil.copy(CERTIFICATES / f"server.{end}", tmp_path / f"used.{end}")
    _, url = start(
        0.0,
        ssl_certfile=str(tmp_path / "used.crt"),
        ssl_keyfile=str(tmp_path / "used.key"),
        ssl_ca_certs=str(CERTIFICATES / "client.crt"),
        ssl_cert_reqs=2,
        enable_ssl_refresh=True,
    )
    assert url.startswith("https://127.0.0.1:")
    body = {"prompt": "x", "max_tokens": 5, "stream": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, verify=trusting("server", "client")).text
    assert answer.endswith("data: [DONE]\n\n")
    for refused in (trusting("server"), trusting("server", "other"), trusting("other", "client")):
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url}/health", verify=refused)
    for end in ("crt", "key"):
        shutil.copy(CERTIFICATES / f"other.{end}", tmp_path / f"used.{end}")
    deadline = time.monotonic() + 10
    while True:
        try:
            assert httpx.get(f"{url}/health", verify=trusting("other", "client")).status_code == 200
            break
        except httpx.TransportError:
            assert time.monotonic() < deadline
            time.sleep(0.1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ssl_certfile": "no.crt"}, "ssl_certfile and ssl_keyfile cannot be used: .*No such file"),
        ({"ssl_certfile": "server.crt", "ssl_keyfile": "other.key"}, "cannot be used: .*MISMATCH"),
        ({"ssl_certfile": "server.crt", "ssl_keyfile": "locked.key"}, "cannot be used"),
        ({"ssl_certfile": "server.crt", "ssl_keyfile": "server.key", "ssl_ca_certs": "no.crt"}, "ssl_ca_certs cannot"),
        ({"ssl_certfile": "server.crt", "ssl_keyfile": "server.key", "ssl_ciphers": "nope"}, "ssl_ciphers selects no"),
    ],
)
def test_certificates_that_cannot_be_used(settings: dict[str, str], message: str) -> None:
    paths = {k: v if k == "ssl_ciphers" else str(CERTIFICATES / v) for k, v in settings.items()}
    with pytest.raises(ConfigError, match=message):
        Certificate(ServerConfig(**paths))  # type: ignore[arg-type]


def test_a_key_with_a_password() -> None:
    paths = {"ssl_certfile": str(CERTIFICATES / "server.crt"), "ssl_keyfile": str(CERTIFICATES / "locked.key")}
    assert not Certificate(ServerConfig(**paths, ssl_keyfile_password="secret")).refresh()  # type: ignore[arg-type]


def test_a_unix_socket(start: Start, tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(path)
    process, where = start(0.0, uds=path)
    assert where == f"unix:{path}"
    with httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://any") as client:
        assert client.get("/health").status_code == 200
        assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 5}).json()["usage"]
    with pytest.raises(JaxserveError, match=r"cannot listen on .*in use"):
        bind(ServerConfig(uds=path))
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    assert not Path(path).exists()
    Path(path).write_text("a file")
    with pytest.raises(JaxserveError, match=r"cannot listen on .*in use"):
        bind(ServerConfig(uds=path))


def test_every_answer_is_logged_once(start: Start) -> None:
    process, url = start(0.0, log_level="info", access_log_exclude=["/metrics"])
    assert process.stderr is not None
    lines: list[str] = []
    with httpx.Client(base_url=url) as client:
        client.get("/metrics")
        for method, path, extra in (
            ("GET", "/health", {"headers": {"X-Request-Id": "mine"}}),
            ("POST", "/v1/completions", {"json": {"prompt": "x", "max_tokens": 5, "stream": True}}),
            ("GET", "/nowhere%0Aelse", {}),
        ):
            client.request(method, path, **extra)
            # A client has all of a stream before its line is written: the next request could overtake that.
            while "access: " not in (line := process.stderr.readline()):
                assert line, "the server has ended"
            lines.append(line.partition("access: ")[2].strip())
    process.send_signal(signal.SIGTERM)
    assert "access: " not in process.communicate(timeout=10)[1]
    assert [re.sub(r"[\d.]+ ms id=.*", "", line) for line in lines] == [
        "GET /health 200 ",
        "POST /v1/completions 200 ",
        "GET /nowhere%0Aelse 404 ",
    ]
    assert lines[0].endswith("id=mine")


def test_nothing_is_logged_of_requests_if_that_is_off(start: Start) -> None:
    process, url = start(0.0, log_level="info", access_log=False)
    httpx.get(f"{url}/v1/models")
    process.send_signal(signal.SIGTERM)
    assert "access" not in process.communicate(timeout=10)[1]
