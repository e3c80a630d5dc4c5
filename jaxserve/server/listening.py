"""What the server listens on: an address or a Unix socket, and the certificate that it shows there."""

from __future__ import annotations

import os
import socket
import ssl
import stat
from pathlib import Path

from jaxserve.config import ServerConfig
from jaxserve.errors import ConfigError, JaxserveError
from jaxserve.server.tracing import check_packages

__all__ = ["Certificate", "address_of", "bind"]


def bind(config: ServerConfig) -> socket.socket:
    """A socket bound to the configured address or path; nothing is accepted yet.

    ConfigError: the address cannot be used on this machine, or files or packages that the server needs are not there:
    better now than after the minutes that go into loading. JaxserveError: the address is in use, or not permitted.
    """
    config.client_keys()
    if config.ssl_certfile is not None:
        Certificate(config)
    if config.otlp_traces_endpoint is not None:
        check_packages()
    if config.uds is not None:
        return _bind_path(config.uds)
    where = f"{config.host}:{config.port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"host {config.host!r} cannot be resolved: {error.strerror or error}.", "host") from None
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return _bound(sock, address, where)


def address_of(sock: socket.socket, scheme: str) -> str:
    """Where a bound socket can be reached: a URL, or the path of a Unix socket."""
    if sock.family == socket.AF_UNIX:
        return f"unix:{sock.getsockname()}"
    host, port = sock.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _bind_path(path: str) -> socket.socket:
    # A socket that a dead server has left behind is replaced; one that answers is not, nor any other kind of file.
    if Path(path).exists() and stat.S_ISSOCK(os.stat(path).st_mode):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)
            except OSError as error:
                raise JaxserveError(f"cannot listen on {path}: {error.strerror or error}.") from None
    return _bound(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), path, path)


def _bound(sock: socket.socket, address: object, where: str) -> socket.socket:
    try:
        sock.bind(address)  # type: ignore[arg-type]
    except OSError as error:
        sock.close()
        raise JaxserveError(f"cannot listen on {where}: {error.strerror or error}.") from None
    return sock


class Certificate:
    """The server's certificate and key, as a TLS context that can load them anew when their files have changed.

    ConfigError: one of the files cannot be used.
    """

    def __init__(self, config: ServerConfig) -> None:
        assert config.ssl_certfile is not None
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._certfile = config.ssl_certfile
        self._keyfile = config.ssl_keyfile or config.ssl_certfile
        # Never None: OpenSSL would ask for a password at the terminal.
        self._password = config.ssl_keyfile_password or ""
        self._seen = self._changed_at()
        try:
            self._load()
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"ssl_certfile and ssl_keyfile cannot be used: {error}.", "ssl_certfile") from None
        self.context.verify_mode = ssl.VerifyMode(config.ssl_cert_reqs)
        if config.ssl_ca_certs is not None:
            try:
                self.context.load_verify_locations(config.ssl_ca_certs)
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(f"ssl_ca_certs cannot be used: {error}.", "ssl_ca_certs") from None
        if config.ssl_ciphers is not None:
            try:
                self.context.set_ciphers(config.ssl_ciphers)
            except ssl.SSLError:
                raise ConfigError(f"ssl_ciphers selects no cipher: {config.ssl_ciphers!r}.", "ssl_ciphers") from None

    def refresh(self) -> bool:
        """Load the files if they have changed; whether they have. OSError, SSLError: the new ones cannot be used."""
        changed_at = self._changed_at()
        if changed_at == self._seen:
            return False
        self._seen = changed_at
        # On a context of its own first: a certificate without its key must not get into the one that serves.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self._certfile, self._keyfile, self._password)
        self._load()
        return True

    def _load(self) -> None:
        self.context.load_cert_chain(self._certfile, self._keyfile, self._password)

    def _changed_at(self) -> tuple[int, ...]:
        paths = (self._certfile, self._keyfile)
        return tuple(os.stat(path).st_mtime_ns if os.path.exists(path) else 0 for path in paths)
