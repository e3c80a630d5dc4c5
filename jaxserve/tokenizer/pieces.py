"""The bytes that one token adds to a text, whatever stands around it.

Decoders of language models look like arbitrary chains, but those in use only join what each token stands for and strip
a space at the very start. Taken apart that way (bytes per token, plus ``Lead``), text can be made token by token at a
constant cost, and a character split over tokens is simply one whose bytes are not all there yet. A decoder that cannot
be taken apart is refused when the tokenizer is loaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tokenizers

from jaxserve.errors import UnsupportedModelError

__all__ = ["Lead", "Pieces"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: visible Latin-1 stands for itself, the rest is moved past U+00FF."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = (byte for byte in range(256) if byte not in visible)
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(moved)}


_BYTE_OF = _byte_level_alphabet()


@dataclass(frozen=True, slots=True)
class Lead:
    """What is stripped where a text starts: up to ``count`` times ``mark``."""

    mark: bytes = b" "
    count: int = 0


@dataclass(slots=True)
class _Rules:
    """A decoder, taken apart."""

    replacements: list[tuple[str, str]]
    prefix: str = ""
    byte_level: bool = False
    byte_fallback: bool = False
    lead: Lead = Lead()

    def piece(self, token: str) -> bytes:
        if self.byte_level:
            # Added tokens may hold characters outside the alphabet: those stand for their own text.
            return bytes(map(_BYTE_OF.__getitem__, token)) if _BYTE_OF.keys() >= set(token) else token.encode()
        for old, new in self.replacements:
            token = token.replace(old, new)
        match = _BYTE_TOKEN.fullmatch(token) if self.byte_fallback else None
        return bytes((int(match[1], 16),)) if match else (self.prefix + token).encode()


class Pieces:
    """Bytes per token id of one tokenizer, looked up on demand and kept."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """Raises UnsupportedModelError if the tokenizer's decoder does more than join pieces."""
        self._backend = backend
        self._rules = _take_apart(backend)
        self._known: dict[int, bytes] = {}

    @property
    def lead(self) -> Lead:
        """What is stripped at the start of a text."""
        return self._rules.lead

    def __getitem__(self, token_id: int) -> bytes:
        """The bytes of a token; none for an id that the tokenizer does not know (models pad their vocabulary)."""
        piece = self._known.get(token_id)
        if piece is None:
            token = self._backend.id_to_token(token_id) if token_id >= 0 else None
            piece = self._known[token_id] = b"" if token is None else self._rules.piece(token)
        return piece


def _take_apart(backend: tokenizers.Tokenizer) -> _Rules:
    if backend.decoder is None:  # tokens are joined by spaces
        return _Rules([], prefix=" ", lead=Lead(count=1))
    rules = _Rules([])
    joined = False
    for step in _steps(json.loads(backend.decoder.__getstate__())):
        match step:
            case {"type": "ByteLevel"}:
                rules.byte_level = joined = True
            case {"type": "ByteFallback"} if not joined:
                rules.byte_fallback = True
            case {"type": "Fuse"}:
                joined = True
            case {"type": "Replace", "pattern": {"String": old}, "content": new} if not joined and len(old) == 1:
                rules.replacements.append((old, new))
            case {"type": "Metaspace", "replacement": old, "prepend_scheme": scheme} if not joined:
                rules.replacements.append((old, " "))
                rules.lead = Lead(count=int(scheme != "never"))
            case {"type": "Strip", "content": mark, "start": count, "stop": 0} if joined:
                rules.lead = Lead(mark.encode(), count)
            case _:
                raise UnsupportedModelError(
                    f"The tokenizer's decoder step {step.get('type')!r} ({step}) is not supported where it stands; "
                    "byte-level, SentencePiece and plain decoders are."
                )
    return rules


def _steps(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if decoder.get("type") == "Sequence":
        for inner in decoder["decoders"]:
            yield from _steps(inner)
    else:
        yield decoder
