"""Parameters that other servers know and this one does not: refused by name, never silently ignored.

Each is accepted with the values that ask for nothing (the default of its API), and with null. A few have no effect on
the answer by definition, whatever their value. A name that nobody knows is told to the client in a header, or, if the
server is strict, refused with the nearest one that is known.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from jaxserve.errors import RequestError, nearest

__all__ = ["CHAT_UNSUPPORTED", "COMPLETION_UNSUPPORTED", "ignored_header", "strip"]

_LONGEST_NAME = 64
_MOST_NAMES = 16

_HARMLESS = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)

_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "early_stopping": (False,),
    "guided_decoding_backend": (),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "repetition_detection": (),
    "spaces_between_special_tokens": (True, False),
    "use_beam_search": (False,),
    "vllm_xargs": (),
}

COMPLETION_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    **_UNSUPPORTED,
    "prompt_embeds": (),
}

CHAT_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    **_UNSUPPORTED,
    "add_special_tokens": (False,),
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": (),
    "mm_processor_kwargs": (),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}


def strip(
    body: Mapping[str, Any], known: Collection[str], unsupported: Mapping[str, tuple[Any, ...]], *, strict: bool
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """``body`` with its ``known`` parameters only, and the names that nobody knows.

    RequestError: it holds a parameter that is unsupported and asks for something, or, if ``strict``, an unknown one.
    """
    kept: dict[str, Any] = {}
    ignored: list[str] = []
    for name, value in body.items():
        if name in known:
            kept[name] = value
        elif name in unsupported:
            if value is not None and not any(_same(value, neutral) for neutral in unsupported[name]):
                raise RequestError(f"{name} is not supported.", name)
        elif name not in _HARMLESS:
            if strict:
                raise _unknown(name, known)
            ignored.append(name)
    return kept, tuple(ignored)


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """The header that names parameters without effect, none if there are none; percent-encoded, and not too long."""
    if not names:
        return {}
    shown = [quote(name[:_LONGEST_NAME], safe="") for name in names[:_MOST_NAMES]]
    more = len(names) - len(shown)
    return {"x-jaxserve-ignored": ", ".join(shown) + (f", and {more} more" if more else "")}


def _unknown(name: str, known: Collection[str]) -> RequestError:
    if len(name) > _LONGEST_NAME:  # may be megabytes, which are neither compared nor sent back
        return RequestError(f"unknown parameter {reprlib.repr(name)}.")
    return RequestError(f"unknown parameter {name!r}.{nearest(name, known)}", name)


def _same(value: Any, neutral: Any) -> bool:
    # Python holds True equal to 1; JSON does not.
    return type(value) is type(neutral) and bool(value == neutral)
