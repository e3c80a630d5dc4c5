"""Where ``complete`` and ``chat`` get their answers: a model in this process, or a running server."""

from __future__ import annotations

import argparse
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from jaxserve import logging
from jaxserve.cli.arguments import flags_of
from jaxserve.cli.settings import ENGINE_PARTS, add_engine_flags, add_sampling_flags, configs
from jaxserve.errors import ConfigError

__all__ = ["Backend", "add_backend_flags", "open_backend"]

_MEANT_FOR_BOTH = frozenset({"model", "seed"})


class Backend(Protocol):
    """Gives answers piece by piece; closing a generator stops its answer."""

    def complete(self, prompt: str, sampling: dict[str, Any]) -> AsyncGenerator[str, None]: ...

    def chat(self, messages: Sequence[dict[str, str]], sampling: dict[str, Any]) -> AsyncGenerator[str, None]: ...

    async def close(self) -> None: ...


def add_backend_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that say where answers come from, and how they are sampled."""
    parser.add_argument("--url", help="Ask the server at this URL instead of loading a model; MODEL is its name there.")
    parser.add_argument("--api-key", metavar="KEY", help="Key of that server.")
    add_engine_flags(parser)
    add_sampling_flags(parser)


def open_backend(args: argparse.Namespace) -> Backend:
    """The backend that the flags ask for. ConfigError: they contradict each other."""
    if args.url is None:
        if args.api_key is not None:
            raise ConfigError("--api-key needs --url.")
        config, _ = configs(args, server=False)
        logging.setup("warning")

        from jaxserve.cli.local import LocalBackend
        from jaxserve.engine import AsyncLLM

        return LocalBackend(AsyncLLM.from_config(config))

    local_only = [flag for part in ENGINE_PARTS for flag in flags_of(part) if flag.name not in _MEANT_FOR_BOTH]
    for flag in local_only:
        if hasattr(args, flag.name):
            raise ConfigError(f"{flag.option} has no effect together with --url.")
    if args.config is not None:
        raise ConfigError("--config has no effect together with --url.")

    from jaxserve.cli.remote import RemoteBackend

    return RemoteBackend(args.url, getattr(args, "model", None), args.api_key)
