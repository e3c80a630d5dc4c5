"""Answers from a running server that speaks OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx

from jaxserve.bench.stream import lines
from jaxserve.errors import ConfigError, JaxserveError

__all__ = ["RemoteBackend"]

# An answer may take long to begin; a server that cannot be reached should not.
_TIMEOUT = httpx.Timeout(600.0, connect=10.0)


class RemoteBackend:
    """A client of the server at ``url``, with or without ``/v1``; without ``model`` the server's first one is asked."""

    def __init__(self, url: str, model: str | None, api_key: str | None) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._model = model
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        try:
            self._client = httpx.AsyncClient(base_url=self._url, headers=headers, timeout=_TIMEOUT)
        except httpx.InvalidURL as error:
            raise ConfigError(f"--url {url!r} is no URL: {error}.") from None

    async def complete(self, prompt: str, sampling: dict[str, Any]) -> AsyncGenerator[str, None]:
        async for choice in self._stream("/v1/completions", {"prompt": prompt, **sampling}):
            yield choice["text"]

    async def chat(self, messages: Sequence[dict[str, str]], sampling: dict[str, Any]) -> AsyncGenerator[str, None]:
        async for choice in self._stream("/v1/chat/completions", {"messages": list(messages), **sampling}):
            yield choice["delta"].get("content") or ""

    async def close(self) -> None:
        await self._client.aclose()

    async def _stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        async with self._reachable():
            body = {"model": self._model or await self._first_model(), **body, "stream": True}
            async with self._client.stream("POST", path, json=body) as response:
                await _check(response)
                async for line in lines(response):
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise JaxserveError(event["error"]["message"])
                    for choice in event["choices"]:
                        yield choice

    async def _first_model(self) -> str:
        response = await self._client.get("/v1/models")
        await _check(response)
        self._model = str(response.json()["data"][0]["id"])
        return self._model

    @asynccontextmanager
    async def _reachable(self) -> AsyncIterator[None]:
        try:
            yield
        except httpx.HTTPError as error:
            reason = str(error).rstrip(".") or type(error).__name__
            raise JaxserveError(f"no answer from {self._url}: {reason}.") from None
        except (LookupError, ValueError) as error:
            raise JaxserveError(f"{self._url} does not answer like an OpenAI server: {error!r}.") from None


async def _check(response: httpx.Response) -> None:
    """JaxserveError: the server refuses."""
    if response.is_success:
        return
    await response.aread()
    try:
        message = response.json()["error"]["message"]
    except (LookupError, TypeError, ValueError):
        message = response.reason_phrase
    raise JaxserveError(f"the server refuses ({response.status_code}): {message}")
