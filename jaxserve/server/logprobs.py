"""Log probabilities in OpenAI's two shapes. The pieces of a stream, put together, are those of the plain answer."""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from typing import Any

from jaxserve.outputs import CompletionOutput, Logprob
from jaxserve.server.protocol import Tokenizer

__all__ = ["TextOffsets", "chat_logprobs", "completion_logprobs"]

_LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot hold."""


class TextOffsets:
    """Where each token of one completion begins in its text, in characters.

    A character may span tokens; all of them begin where it does.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def next(self, token_id: int) -> int:
        """The offset of the next token."""
        offset = self._length
        self._length += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
        return offset


def completion_logprobs(output: CompletionOutput, offsets: TextOffsets) -> dict[str, Any] | None:
    """The parallel lists of the completions endpoint, None if none were asked.

    ``top_logprobs`` holds the sampled token and the likeliest ones: up to one more than asked.
    """
    if output.logprobs is None:
        return None
    shaped: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token_id, entries in zip(output.token_ids, output.logprobs, strict=True):
        top: dict[str, float] = {}
        for _, entry in _likeliest_first(entries):
            # Different tokens may look alike (parts of a character do); the likeliest one is shown.
            top.setdefault(entry.decoded_token, _finite(entry.logprob))
        shaped["tokens"].append(entries[token_id].decoded_token)
        shaped["token_logprobs"].append(_finite(entries[token_id].logprob))
        shaped["top_logprobs"].append(top)
        shaped["text_offset"].append(offsets.next(token_id))
    return shaped


def chat_logprobs(output: CompletionOutput, num_top: int, tokenizer: Tokenizer) -> dict[str, Any] | None:
    """The list of the chat endpoint, None if none were asked; ``num_top`` alternatives per token."""
    if output.logprobs is None:
        return None
    content = []
    for token_id, entries in zip(output.token_ids, output.logprobs, strict=True):
        likeliest = _likeliest_first(entries)[:num_top]
        top = [_chat_entry(id, entry, tokenizer) for id, entry in likeliest]
        content.append({**_chat_entry(token_id, entries[token_id], tokenizer), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _chat_entry(token_id: int, entry: Logprob, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "token": entry.decoded_token,
        "logprob": _finite(entry.logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def _likeliest_first(entries: Mapping[int, Logprob]) -> list[tuple[int, Logprob]]:
    return sorted(entries.items(), key=lambda item: -item[1].logprob)


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
