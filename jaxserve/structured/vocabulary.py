"""What tokens stand for, as grammars see it.

The vocabulary is handed to llguidance as bytes per token. Special tokens stand for themselves and match no text; those
that end a sequence are legal where a grammar may end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import llguidance

__all__ = ["Vocabulary", "make_tokenizer"]


@dataclass(frozen=True)
class Vocabulary:
    """What tokens stand for.

    Attributes:
        tokens: bytes that each token [V] adds to a text; none for ids that are not in use.
        special_ids: tokens that do not stand for text.
        eos_ids: tokens that end a text.
        encode: token ids of a text, as the model was trained to see it.
    """

    tokens: Sequence[bytes]
    special_ids: frozenset[int]
    eos_ids: tuple[int, ...]
    encode: Callable[[str], Sequence[int]]


def make_tokenizer(vocabulary: Vocabulary) -> llguidance.LLTokenizer | None:
    """What llguidance makes of a vocabulary, which takes a second for a large one; None without a token that ends a
    text."""
    eos = list(vocabulary.eos_ids)
    return llguidance.LLTokenizer(_Tokens(vocabulary), eos_token=eos) if eos else None


class _Tokens(llguidance.TokenizerWrapper):
    """A vocabulary in the form that llguidance reads. It calls this from Rust, where an exception is a panic."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.is_tokenizer_wrapper = True
        self.bos_token_id = None
        self.tokens = vocabulary.tokens
        self.eos_token_id = vocabulary.eos_ids[0]
        self.special_token_ids = sorted(vocabulary.special_ids | set(vocabulary.eos_ids))
        self._encode = vocabulary.encode

    def __call__(self, forced: str) -> list[int]:
        """Token ids of a text that the grammar forces."""
        ids, text = list(self._encode(forced)), forced.encode()
        if b"".join(self.tokens[token] for token in ids) == text:
            return ids
        # SentencePiece begins a text with a space, which is none that the grammar knows: the longest tokens, then.
        ids = []
        while text:
            size = next((n for n in range(min(len(text), self._longest), 0, -1) if text[:n] in self._by_bytes), 0)
            if not size:
                break  # the vocabulary has no token for this byte
            ids.append(self._by_bytes[text[:size]])
            text = text[size:]
        return ids

    @cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        special = set(self.special_token_ids)
        return {piece: token for token, piece in enumerate(self.tokens) if piece and token not in special}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._by_bytes), default=0)
