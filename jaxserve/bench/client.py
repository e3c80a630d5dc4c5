"""One streamed request after another to a server that speaks OpenAI's API, with the times of what comes back."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

import httpx

from jaxserve.bench.datasets import Sample
from jaxserve.bench.options import ServeOptions
from jaxserve.bench.records import Record
from jaxserve.bench.stream import lines
from jaxserve.errors import ConfigError, JaxserveError

__all__ = ["Client"]

_MAX_ERROR = 300


class Client:
    """Asks the server of ``options``; used within ``async with``."""

    def __init__(self, options: ServeOptions) -> None:
        self._options = options
        self._url = options.base_url.rstrip("/").removesuffix("/v1")
        self._model = options.model or ""
        headers = {} if options.api_key is None else {"Authorization": f"Bearer {options.api_key}"}
        # A request's time is bounded as a whole; connections are as many as the arrivals ask for.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        try:
            if (httpx.URL(self._url).port or 0) > 65535:
                raise ConfigError(f"--base-url {options.base_url!r} is no URL: its port is above 65535.")
            self._http = httpx.AsyncClient(base_url=self._url, headers=headers, timeout=None, limits=limits)
        except httpx.InvalidURL as error:
            raise ConfigError(f"--base-url {options.base_url!r} is no URL: {error}.") from None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def find_model(self) -> str:
        """The model that is asked for: as given, else the first that the server lists.

        JaxserveError: the server cannot be reached, or lists none.
        """
        seconds = min(10.0, self._options.timeout)
        try:
            async with asyncio.timeout(seconds):
                response = await self._http.get("/v1/models")
            if not self._model and not response.is_success:
                refusal = _refusal(response.status_code, response.content)[:_MAX_ERROR].rstrip(".")
                hint = "its key is --api-key" if response.status_code in (401, 403) else "name one with --model"
                raise JaxserveError(f"{self._url} lists no model ({refusal}); {hint}.")
            self._model = self._model or str(response.json()["data"][0]["id"])
        except TimeoutError:
            raise JaxserveError(f"no answer from {self._url} within {seconds:g} s.") from None
        except httpx.HTTPError as error:
            raise JaxserveError(f"no answer from {self._url}: {_reason(error)}.") from None
        except (LookupError, TypeError, ValueError, RecursionError):
            raise JaxserveError(f"{self._url} lists no model; name one with --model.") from None
        return self._model

    async def ask(self, sample: Sample) -> Record:
        """Send one request and read its answer to the end; whatever goes wrong is the record's error."""
        record = Record(time.perf_counter(), num_prompt=sample.num_prompt)
        try:
            async with asyncio.timeout(self._options.timeout):
                await self._stream(self._body(sample), record)
        except TimeoutError:
            record.error = f"no complete answer within {self._options.timeout:g} s"
        except httpx.HTTPError as error:
            record.error = _reason(error)
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            record.error = f"the answer is not like OpenAI's: {error!r}"
        except JaxserveError as error:
            record.error = str(error)
        if record.error is not None:
            record.error = record.error[:_MAX_ERROR]
        return record

    def _body(self, sample: Sample) -> dict[str, Any]:
        options = self._options
        prompt: dict[str, Any] = {"prompt": sample.prompt}
        if options.endpoint == "/v1/chat/completions":
            prompt = {"messages": [{"role": "user", "content": sample.text}]}
        # Servers other than vLLM and its kin refuse a parameter that they do not know.
        extra = {"ignore_eos": True} if options.ignore_eos else {}
        return {
            "model": self._model,
            **prompt,
            "max_tokens": sample.max_tokens,
            "temperature": options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **extra,
        }

    async def _stream(self, body: dict[str, Any], record: Record) -> None:
        finished = False
        async with self._http.stream("POST", self._options.endpoint, json=body) as response:
            if not response.is_success:
                raise JaxserveError(_refusal(response.status_code, await response.aread()))
            async for line in lines(response):
                now = time.perf_counter()
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:") or data == "[DONE]":
                    continue
                event = json.loads(data)
                if event.get("error"):
                    raise JaxserveError(_message(event["error"]))
                choices = event.get("choices") or ()
                if any(map(_has_text, choices)):
                    record.pieces.append(now)
                if choices:
                    record.finished = now
                finished |= any(choice.get("finish_reason") for choice in choices)
                if usage := event.get("usage"):
                    record.num_prompt, record.num_output = _count(usage, "prompt"), _count(usage, "completion")
        if not finished:
            raise JaxserveError("the answer broke off")
        record.num_output = record.num_output or len(record.pieces)


def _count(usage: dict[str, Any], kind: str) -> int:
    count = usage[f"{kind}_tokens"]
    if type(count) is not int or count < 0:
        raise ValueError(f"{kind}_tokens is {count!r}")
    return count


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    parts: Iterable[Any] = (choice.get("text"), delta.get("content"), delta.get("reasoning_content"))
    return any(parts) or bool(delta.get("tool_calls"))


def _reason(error: httpx.HTTPError) -> str:
    return f"{type(error).__name__}: {error}".rstrip(".: ")


def _refusal(status: int, body: bytes) -> str:
    try:
        return f"{status}: {_message(json.loads(body)['error'])}"
    except (LookupError, TypeError, ValueError):
        return f"{status}: {body.decode('utf-8', 'replace')}"


def _message(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
