"""A file of requests, answered through the server's own app: OpenAI's batch format, without a network.

Answers are appended to a file beside the output as they come. Only when all are there does it take the output's name;
until then a run that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import httpx
from starlette.types import ASGIApp

from jaxserve.errors import ConfigError, JaxserveError
from jaxserve.server.jsonio import dumps

__all__ = ["BatchReport", "run_batch"]


@dataclass
class BatchReport:
    """How many lines were there before, were answered, and of these failed."""

    resumed: int = 0
    answered: int = 0
    failed: int = 0


@dataclass(frozen=True)
class _Item:
    """One line: its request, or why there is none."""

    custom_id: str | None
    url: str = ""
    body: Any = None
    fault: str | None = None


async def run_batch(
    app: ASGIApp, source: Path, target: Path, *, concurrency: int, progress: Callable[[int, int], None]
) -> BatchReport:
    """Answer every line of ``source`` into ``target``.

    Args:
        app: what answers.
        source: JSON lines with custom_id, method, url and body.
        target: gets a line with custom_id, response and error for each, in the order of their ends.
        concurrency: requests under way at once.
        progress: told how many lines of how many are done.

    ConfigError: a file cannot be read or written. JaxserveError: the engine has stopped; what was answered is kept.
    """
    items = list(_items(source))
    partial = target.with_name(target.name + ".partial")
    report = BatchReport()
    try:
        done = _repaired(partial)
        left = [item for item in items if item.custom_id is None or item.custom_id not in done]
        report.resumed = len(items) - len(left)
        progress(report.resumed, len(items))
        transport = httpx.ASGITransport(app)
        with partial.open("a", encoding="utf-8") as sink:
            async with httpx.AsyncClient(transport=transport, base_url="http://batch", timeout=None) as client:
                async for answer in _answers(client, left, concurrency):
                    _write(sink, answer)
                    report.answered += 1
                    report.failed += answer["error"] is not None or answer["response"]["status_code"] != 200
                    progress(report.resumed + report.answered, len(items))
        os.replace(partial, target)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror or error}.") from None
    return report


async def _answers(client: httpx.AsyncClient, items: list[_Item], concurrency: int) -> AsyncIterator[dict[str, Any]]:
    """Answers as they come."""
    waiting = iter(items)
    running: set[asyncio.Task[dict[str, Any]]] = set()
    async with _cancelled(running):
        while True:
            for item in waiting:
                running.add(asyncio.create_task(_answer(client, item)))
                if len(running) >= concurrency:
                    break
            if not running:
                return
            ended, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                running.discard(task)
                yield task.result()


@asynccontextmanager
async def _cancelled(tasks: set[asyncio.Task[dict[str, Any]]]) -> AsyncIterator[None]:
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _answer(client: httpx.AsyncClient, item: _Item) -> dict[str, Any]:
    answer: dict[str, Any] = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": item.custom_id}
    if item.fault is not None:
        return {**answer, "response": None, "error": {"code": "invalid_request", "message": item.fault}}
    response = await _post(client, item)
    if response.status_code == 503:
        raise JaxserveError(f"the batch has stopped: {response.json()['error']['message']}")
    is_json = "json" in response.headers.get("content-type", "")
    shown = {
        "status_code": response.status_code,
        "request_id": response.headers.get("x-request-id"),
        "body": response.json() if is_json else response.text,
    }
    return {**answer, "response": shown, "error": None}


async def _post(client: httpx.AsyncClient, item: _Item) -> httpx.Response:
    """The answer, asked for again for as long as there is no room for the request."""
    content, headers = dumps(item.body), {"Content-Type": "application/json"}
    while True:
        response = await client.post(item.url, content=content, headers=headers)
        pause = response.headers.get("retry-after")
        if response.status_code != 503 or pause is None:
            return response
        await asyncio.sleep(float(pause))


def _items(source: Path) -> Iterator[_Item]:
    """The lines of a file; empty ones are none."""
    seen: set[str] = set()
    try:
        with source.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    item = _item(line, number)
                    if item.custom_id is not None and item.custom_id in seen:
                        item = _Item(None, fault=f"line {number}: custom_id {item.custom_id!r} was there before.")
                    elif item.custom_id is not None:
                        seen.add(item.custom_id)
                    yield item
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigError(f"{source} cannot be read: {reason}.") from None


def _item(line: str, number: int) -> _Item:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        return _Item(None, fault=f"line {number} is not valid JSON: {error}.")
    if not isinstance(value, dict) or not isinstance(value.get("custom_id"), str):
        return _Item(None, fault=f"line {number} must be an object with a custom_id.")
    custom_id, method, url, body = (value.get(name) for name in ("custom_id", "method", "url", "body"))
    if method != "POST" or not isinstance(url, str) or not url.startswith("/v1/"):
        return _Item(custom_id, fault=f"line {number}: method must be POST, and url a path that begins with /v1/.")
    if not isinstance(body, dict):
        return _Item(custom_id, fault=f"line {number}: body must be an object.")
    for name in ("stream", "background"):
        if body.get(name):
            return _Item(custom_id, fault=f"line {number}: {name} has no place in a batch.")
    try:
        dumps(body)
    except ValueError:
        return _Item(custom_id, fault=f"line {number}: body holds NaN or an infinity, which is not valid JSON.")
    except RecursionError:
        return _Item(custom_id, fault=f"line {number}: body nests too deeply.")
    return _Item(custom_id, url, body)


def _repaired(partial: Path) -> set[str]:
    """Ids that were answered before; a last line that was cut short is taken away, as are answers to what has no id."""
    if not partial.exists():
        return set()
    whole, done = [], set()
    for line in partial.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            answer = json.loads(line) if line.endswith("\n") else None
        except ValueError:
            answer = None
        if answer is not None and answer["custom_id"] is not None:
            whole.append(line)
            done.add(answer["custom_id"])
    fresh = partial.with_name(partial.name + ".new")
    fresh.write_text("".join(whole), encoding="utf-8")
    os.replace(fresh, partial)
    return done


def _write(sink: TextIO, answer: dict[str, Any]) -> None:
    sink.write(dumps(answer).decode("ascii") + "\n")
    sink.flush()
