"""How the server meets the network: where it listens, whom it lets in, how much it bears, and what it tells operators.

``jaxserve.config.ServerConfig`` inherits these fields, so that users see one group of flags.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.settings import check_choices, check_integer, check_seconds, flag

__all__ = ["HttpConfig"]


@dataclass(frozen=True)
class HttpConfig:
    """The HTTP side of a server."""

    host: str = flag("127.0.0.1", "Address to listen on.")
    port: int = flag(8000, "Port to listen on; 0 picks a free one.")
    uds: str | None = flag(None, "Unix socket to listen on, instead of host and port.")
    root_path: str | None = flag(None, "Path under which a proxy shows the server; the proxy takes it off requests.")
    ssl_certfile: str | None = flag(None, "PEM file of the certificate (with its chain): serve HTTPS.")
    ssl_keyfile: str | None = flag(None, "PEM file of its private key; by default the same file.")
    ssl_keyfile_password: str | None = flag(None, "Password of the private key.")
    ssl_ca_certs: str | None = flag(None, "PEM file of the authorities that sign the certificates of clients.")
    ssl_cert_reqs: int = flag(
        0, "Certificates of clients: 0 asks for none, 1 checks those that are sent, 2 wants one.", choices=(0, 1, 2)
    )
    ssl_ciphers: str | None = flag(None, "Ciphers of TLS up to 1.2, in OpenSSL's notation; by default Python's.")
    enable_ssl_refresh: bool = flag(False, "Load certificate and key anew when their files change.")
    allowed_origins: tuple[str, ...] = flag(
        (), "Origins of web pages that may use the server from a browser (CORS), or *; none by default."
    )
    allowed_methods: tuple[str, ...] = flag(("GET", "POST"), "Methods that such pages may use, or *.")
    allowed_headers: tuple[str, ...] = flag(("*",), "Headers that such pages may send, or *.")
    allow_credentials: bool = flag(False, "Let such pages send cookies and authorization of the browser.")
    api_key: tuple[str, ...] = flag((), "Keys of which a client must send one; none leaves the server open.")
    api_key_file: str | None = flag(None, "File of more such keys, one a line; lines that begin with # are comments.")
    admin_api_key: tuple[str, ...] = flag(
        (), "Keys of which one is needed to pause, abort, reset, profile, or load adapters; good for all else too."
    )
    max_concurrency_per_key: int = flag(
        0, "Most requests at once that one key may have under way before it gets 429; 0 is no limit."
    )
    max_request_body: int = flag(16 * 2**20, "Most bytes of a request's body before it gets 413.", human=True)
    request_timeout: float | None = flag(None, "Seconds after which a request that is not finished gets 504.")
    ttft_timeout: float | None = flag(None, "Seconds after which a request without a first token gets 503.")
    sse_keep_alive_interval: float = flag(
        15.0, "Seconds without an event after which a stream gets an empty line, so that proxies keep it; 0 sends none."
    )
    shutdown_timeout: float = flag(30.0, "Seconds that running requests may still take after SIGTERM.")
    ui: bool = flag(True, "Serve the page at /: chat, live view and calculator.")
    metrics_compat: str = flag(
        "vllm", "Names under which metrics are shown beside jaxserve's own.", choices=("vllm", "none")
    )
    otlp_traces_endpoint: str | None = flag(
        None, "URL of an OpenTelemetry collector (OTLP over HTTP) that gets a trace of every request."
    )
    access_log: bool = flag(True, "Log a line for every request that was answered.")
    access_log_exclude: tuple[str, ...] = flag(
        ("/health", "/ping", "/ready", "/metrics"), "Paths whose requests are not logged."
    )
    log_level: str = flag("info", "Least level that is logged.", choices=("debug", "info", "warning", "error"))

    def __post_init__(self) -> None:
        check_choices(self)
        check_integer(self, "port", 0, 65535)
        check_integer(self, "max_concurrency_per_key", 0)
        check_integer(self, "max_request_body", 1)
        for name in ("shutdown_timeout", "sse_keep_alive_interval"):
            check_seconds(self, name)
        for name in ("request_timeout", "ttft_timeout"):
            check_seconds(self, name, positive=True)
        for name in ("allowed_origins", "allowed_methods", "allowed_headers"):
            object.__setattr__(self, name, _listed(name, getattr(self, name)))
        for name in ("api_key", "admin_api_key", "allowed_origins"):
            if "" in getattr(self, name):
                raise ConfigError(f"{name} must not hold an empty string.", name)
        if self.root_path is not None and not re.fullmatch(r"(/[^/]+)+", self.root_path):
            raise ConfigError(f"root_path must begin with / and not end with it, got {self.root_path!r}.", "root_path")
        if self.max_concurrency_per_key and not self.api_key and self.api_key_file is None:
            raise ConfigError(
                "max_concurrency_per_key has no effect without keys (--api-key).", "max_concurrency_per_key"
            )
        self._check_tls()

    def _check_tls(self) -> None:
        if self.ssl_certfile is None:
            for name in ("ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs", "ssl_ciphers"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"{name} has no effect without a certificate (--ssl-certfile).", name)
            if self.ssl_cert_reqs or self.enable_ssl_refresh:
                name = "ssl_cert_reqs" if self.ssl_cert_reqs else "enable_ssl_refresh"
                raise ConfigError(f"{name} has no effect without a certificate (--ssl-certfile).", name)
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ConfigError("ssl_cert_reqs needs the authorities of clients (--ssl-ca-certs).", "ssl_cert_reqs")

    def client_keys(self) -> tuple[str, ...]:
        """All keys of ordinary clients. ConfigError: the file cannot be read, or holds none."""
        if self.api_key_file is None:
            return self.api_key
        try:
            lines = Path(self.api_key_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8"
            raise ConfigError(f"api_key_file {self.api_key_file!r} cannot be read: {reason}.", "api_key_file") from None
        stripped = (line.strip() for line in lines)
        keys = tuple(line for line in stripped if line and not line.startswith("#"))
        if not keys:
            # An empty file must not open the server.
            raise ConfigError(f"api_key_file {self.api_key_file!r} holds no key.", "api_key_file")
        return (*self.api_key, *keys)


def _listed(name: str, values: Any) -> tuple[str, ...]:
    """Values as they are, or those of one JSON list, as vLLM's flags have them."""
    if len(values) != 1 or not values[0].startswith("["):
        return tuple(values)
    try:
        listed = json.loads(values[0])
    except ValueError:
        listed = None
    if not isinstance(listed, list) or not all(isinstance(item, str) for item in listed):
        raise ConfigError(f"{name} must hold plain values, or one JSON list of strings, got {values[0]!r}.", name)
    return tuple(listed)
