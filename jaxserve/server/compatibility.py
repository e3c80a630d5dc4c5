"""Parameters that other servers know and this one does not: refused by name, never silently ignored.

Each is accepted with the values that ask for nothing (the default of its API), and with null. A few have no effect on
the answer by definition, whatever their value. A name that nobody knows is refused with the nearest one that is known.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping
from typing import Any

from jaxserve.errors import RequestError, nearest

__all__ = ["CHAT_UNSUPPORTED", "COMPLETION_UNSUPPORTED", "strip"]

_LONGEST_NAME = 64

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
    "detokenize": (True,),
    "early_stopping": (False,),
    "guided_decoding_backend": (),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "prompt_logprobs": (),
    "repetition_detection": (),
    "request_id": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": (),
}

COMPLETION_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    **_UNSUPPORTED,
    "add_special_tokens": (True,),
    "prompt_embeds": (),
    "suffix": ("",),
}

CHAT_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    **_UNSUPPORTED,
    "add_special_tokens": (False,),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "documents": (),
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
    body: Mapping[str, Any], known: Collection[str], unsupported: Mapping[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """``body`` with its ``known`` parameters only.

    RequestError: it holds a parameter that is unknown, or one that is unsupported and asks for something.
    """
    kept: dict[str, Any] = {}
    for name, value in body.items():
        if name in known:
            kept[name] = value
        elif name in unsupported:
            if value is not None and not any(_same(value, neutral) for neutral in unsupported[name]):
                raise RequestError(f"{name} is not supported.", name)
        elif name not in _HARMLESS:
            if len(name) > _LONGEST_NAME:  # may be megabytes, which are neither compared nor sent back
                raise RequestError(f"unknown parameter {reprlib.repr(name)}.")
            raise RequestError(f"unknown parameter {name!r}.{nearest(name, known)}", name)
    return kept


def _same(value: Any, neutral: Any) -> bool:
    # Python holds True equal to 1; JSON does not.
    return type(value) is type(neutral) and bool(value == neutral)
