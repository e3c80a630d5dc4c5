"""A small vocabulary that can write JSON, and what an output over it is as text."""

from __future__ import annotations

from collections.abc import Iterable

from jaxserve.structured import Vocabulary

__all__ = ["EOS", "SIZE", "THINK", "VOCABULARY", "encode", "text_of"]

EOS, THINK, UNTHINK = 3, 1, 2
_SPECIAL = [b"<pad>", b"<think>", b"</think>", b"<eos>"]
_PIECES = [b'{"', b'": ', b", ", b'"', b"true", b"null", "日".encode()[:2], "日".encode()[2:]]
_LETTERS = [bytes([byte]) for byte in b'{}[]:,-.E+0123456789 \n\\abcdefghijklmnoprstu<>/x"']
TOKENS = [*_SPECIAL, *_PIECES, *dict.fromkeys(_LETTERS)]
SIZE = 61
TOKENS += [b""] * (SIZE - len(TOKENS))


def encode(text: str) -> list[int]:
    """Token ids, longest first."""
    data, ids = text.encode(), []
    by_length = sorted(range(len(_SPECIAL), SIZE), key=lambda token: -len(TOKENS[token]))
    while data:
        token = next((t for t in by_length if TOKENS[t] and data.startswith(TOKENS[t])), None)
        if token is None:
            break  # not a text of this vocabulary
        ids.append(token)
        data = data[len(TOKENS[token]) :]
    return ids


def text_of(ids: Iterable[int]) -> str:
    """Text of an output, without the token that ends it."""
    return b"".join(TOKENS[token] for token in ids if token != EOS).decode()


VOCABULARY = Vocabulary(TOKENS, frozenset({0, THINK, UNTHINK, EOS}), (EOS,), encode)
