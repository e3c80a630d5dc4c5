"""JSON in and out. What comes in is checked before anything looks at it; what goes out is always valid JSON.

Python's parser takes more than JSON allows: NaN and infinities, and lone surrogates, which break the next encoding to
UTF-8. Both are refused here, so that no later code has to think of them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.errors import RequestError

__all__ = ["MAX_DEPTH", "check_type", "dumps", "parse_json", "parse_object", "read_chunks", "read_object", "respond"]

_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
MAX_DEPTH = 200
"""Arrays and objects that may lie in each other."""

_SHORT = 64 * 2**10
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


async def read_object(request: Request) -> dict[str, Any]:
    """The request's body, a JSON object, where that is never large; others come through the ``Intake``.

    RequestError: it is something else, or longer than 64 KiB.
    """
    check_type(request)
    data = b"".join(await read_chunks(request))
    if len(data) > _SHORT:
        raise RequestError(f"the body is longer than {_SHORT} bytes, which is the limit of this path.")
    return parse_object(data)


def check_type(request: Request) -> None:
    """RequestError: the body is not said to be JSON."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise RequestError(f"Content-Type must be application/json, got {media_type[:64] or 'none'!r}.")


def parse_object(data: bytes) -> dict[str, Any]:
    """The JSON object in ``data``. RequestError: it is something else."""
    value = parse_json(data)
    if not isinstance(value, dict):
        raise RequestError(f"the body must be a JSON object, got {_kind(value)}.")
    return value


def parse_json(data: bytes) -> Any:
    """The value of a JSON text in UTF-8. RequestError: it is not valid, nests too deeply, or holds a lone surrogate."""
    try:
        value = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant, parse_float=_finite)
        if data.count(b"[") + data.count(b"{") > MAX_DEPTH:
            _check_depth(value)
        if _SURROGATE_ESCAPE.search(data):
            _check_text(value)
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not valid UTF-8 (byte {error.start}).") from None
    except json.JSONDecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error}.") from None
    except RecursionError:
        raise _too_deep() from None
    except RequestError:
        raise
    except ValueError as error:  # an integer with thousands of digits
        raise RequestError(f"the body holds a number that cannot be read: {error}") from None
    return value


def dumps(value: Any) -> bytes:
    """JSON in pure ASCII: nothing in it can break a line of an event stream, or fail to encode."""
    return _ENCODER.encode(value).encode("ascii")


def respond(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response whose body is ``value`` as JSON."""
    return Response(dumps(value), status, headers, media_type="application/json")


async def read_chunks(request: Request) -> list[bytes]:
    """The request's body, in pieces. HTTPException 413: it is longer than the app's ``state.max_body`` bytes."""
    limit: int = request.app.state.max_body
    too_large = HTTPException(413, f"the body is longer than {limit} bytes (--max-request-body).")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise too_large
    chunks, length = [], 0
    async for chunk in request.stream():
        chunks.append(chunk)
        length += len(chunk)
        if length > limit:
            raise too_large
    return chunks


def _refuse_constant(name: str) -> NoReturn:
    raise RequestError(f"the body holds {name}, which is not valid JSON; numbers must be finite.")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise RequestError(f"the body holds the number {text[:40]}, which is too large.")
    return value


def _check_depth(value: Any) -> None:
    """Refuse what nests too deeply for those who go through it later. Level by level: here depth does not matter."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        containers = [item for item in level if type(item) in (dict, list)]
        if not containers:
            return
        level = [part for item in containers for part in (item.values() if type(item) is dict else item)]
    raise _too_deep()


def _too_deep() -> RequestError:
    return RequestError(f"the body nests more than {MAX_DEPTH} levels deep, which is the limit.")


def _check_text(value: Any, param: str | None = None) -> None:
    """Refuse strings with a lone surrogate; ``param`` is the top-level name that holds ``value``."""
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            escape = f"\\u{ord(value[error.start]):04x}"
            raise RequestError(f"text must be valid Unicode, but holds the lone surrogate {escape}.", param) from None
    elif isinstance(value, list):
        for item in value:
            _check_text(item, param)
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_text(key, param)
            _check_text(item, param or key)


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    return {bool: "a boolean", str: "a string", list: "an array"}.get(type(value), "a number")
