"""Log probabilities in OpenAI's two shapes. The pieces of a stream, put together, are those of the plain answer."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.outputs import CompletionOutput, Logprob
from jaxserve.server.protocol import Tokenizer

__all__ = [
    "EchoOffsets",
    "TextOffsets",
    "chat_logprobs",
    "completion_logprobs",
    "echoed_logprobs",
    "joined_logprobs",
    "prompt_logprobs",
    "token_name",
]

_LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot hold."""


class TextOffsets:
    """Where each token of one completion begins in its text, in characters.

    A character may span tokens; all of them begin where it does.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool, as_ids: bool = False, start: int = 0) -> None:
        """With ``skip_special``, special tokens are no part of the text; with ``as_ids``, tokens are shown by id.

        ``start`` characters stand before the first token.
        """
        self._as_ids = as_ids
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = start

    def text(self, token_id: int) -> str:
        """How a token is shown."""
        return token_name(token_id) if self._as_ids else self._tokenizer.token_text(token_id)

    def next(self, token_id: int) -> int:
        """The offset of the next token."""
        offset = self._length
        if token_id in self._skipped:
            return offset
        self._length += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
        return offset


class EchoOffsets(TextOffsets):
    """Where each token of a prompt begins in the text that is echoed.

    The two differ: tokens that were put before the text are no part of it, nor is the space that SentencePiece puts
    there; and special tokens are, where a client has written them.
    """

    def __init__(self, tokenizer: Tokenizer, text: str, token_ids: Sequence[int], *, as_ids: bool = False) -> None:
        super().__init__(tokenizer, skip_special=False, as_ids=as_ids)
        for stripped in (True, False):
            offsets, length = _walk(tokenizer, text, token_ids, stripped=stripped)
            if length == len(text):
                break
        self._offsets = iter(offsets)

    def next(self, token_id: int) -> int:
        return next(self._offsets)


def _walk(tokenizer: Tokenizer, text: str, token_ids: Sequence[int], *, stripped: bool) -> tuple[list[int], int]:
    """Offsets of tokens, and their characters in all, if a space that they begin with is ``stripped`` or not."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets, length = [], 0
    for token_id in token_ids:
        offsets.append(min(length, len(text)))
        piece = tokenizer.token_bytes(token_id)
        if token_id in tokenizer.special_ids:
            shown = piece.decode("utf-8", "replace")
            length += len(shown) if text.startswith(shown, length) else 0
            continue
        if piece.startswith(b" ") and (stripped or not text.startswith(" ", length)):
            piece = piece[1:]
        stripped = False
        length += len(decoder.decode(piece))
    return offsets, length


def completion_logprobs(output: CompletionOutput, offsets: TextOffsets) -> dict[str, Any] | None:
    """The parallel lists of the completions endpoint, None if none were asked.

    ``top_logprobs`` holds the sampled token and the likeliest ones: up to one more than asked.
    """
    if output.logprobs is None:
        return None
    return _parallel(output.token_ids, output.logprobs, offsets)


def echoed_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[Mapping[int, Logprob] | None], offsets: TextOffsets, num_top: int
) -> dict[str, Any]:
    """The same lists for a prompt that is echoed. Its first token follows nothing: it has no log probability."""
    kept = [
        None
        if entries is None
        else {id: entry for id, entry in entries.items() if id == token or (entry.rank or 0) <= num_top}
        for token, entries in zip(token_ids, logprobs, strict=True)
    ]
    return _parallel(token_ids, kept, offsets)


def joined_logprobs(first: dict[str, Any] | None, second: dict[str, Any] | None) -> dict[str, Any] | None:
    """Lists of two pieces of a text as those of one."""
    if first is None or second is None:
        return first or second
    return {name: first[name] + second[name] for name in first}


def prompt_logprobs(logprobs: Sequence[Mapping[int, Logprob] | None]) -> list[dict[str, Any] | None]:
    """In vLLM's shape: per token what it and the likeliest ones have, null for the first."""
    return [
        None
        if entries is None
        else {
            str(token): {"logprob": _finite(entry.logprob), "rank": entry.rank, "decoded_token": entry.decoded_token}
            for token, entry in entries.items()
        }
        for entries in logprobs
    ]


def _parallel(
    token_ids: Sequence[int], logprobs: Sequence[Mapping[int, Logprob] | None], offsets: TextOffsets
) -> dict[str, Any]:
    shaped: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token_id, entries in zip(token_ids, logprobs, strict=True):
        shaped["text_offset"].append(offsets.next(token_id))
        if entries is None:
            shaped["tokens"].append(offsets.text(token_id))
            shaped["token_logprobs"].append(None)
            shaped["top_logprobs"].append(None)
            continue
        top: dict[str, float] = {}
        for other, entry in _likeliest_first(entries):
            # Different tokens may look alike (parts of a character do); the likeliest one is shown.
            top.setdefault(offsets.text(other), _finite(entry.logprob))
        shaped["tokens"].append(offsets.text(token_id))
        shaped["token_logprobs"].append(_finite(entries[token_id].logprob))
        shaped["top_logprobs"].append(top)
    return shaped


def chat_logprobs(
    output: CompletionOutput, num_top: int, tokenizer: Tokenizer, *, as_ids: bool = False
) -> dict[str, Any] | None:
    """The list of the chat endpoint, None if none were asked; ``num_top`` alternatives per token, maybe by id."""
    if output.logprobs is None:
        return None
    content = []
    for token_id, entries in zip(output.token_ids, output.logprobs, strict=True):
        likeliest = _likeliest_first(entries)[:num_top]
        top = [_chat_entry(id, entry, tokenizer, as_ids) for id, entry in likeliest]
        content.append({**_chat_entry(token_id, entries[token_id], tokenizer, as_ids), "top_logprobs": top})
    return {"content": content, "refusal": None}


def token_name(token_id: int) -> str:
    """A token by its id, as vLLM writes it."""
    return f"token_id:{token_id}"


def _chat_entry(token_id: int, entry: Logprob, tokenizer: Tokenizer, as_ids: bool) -> dict[str, Any]:
    return {
        "token": token_name(token_id) if as_ids else entry.decoded_token,
        "logprob": _finite(entry.logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def _likeliest_first(entries: Mapping[int, Logprob]) -> list[tuple[int, Logprob]]:
    return sorted(entries.items(), key=lambda item: -item[1].logprob)


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
