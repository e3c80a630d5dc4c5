"""Token ids to text as they come.

What is promised: the joined pushes and the final flush equal ``Tokenizer.decode`` of the same ids, however they were
cut into pushes, except that text after a prompt is not the start of a text (a SentencePiece word keeps its space).
A character whose bytes are not all there is held back; bytes that can never become one turn into U+FFFD as soon as that
is certain, so that nothing waits longer than three bytes.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxserve.tokenizer.tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer"]

_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """Turns one output's token ids into text; O(1) per token."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool = True) -> None:
        """``prompt_ids`` only decide whether the output is the start of a text; empty makes it one."""
        self._pieces = tokenizer.pieces
        self._skipped: frozenset[int] = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = _new_utf8_decoder("replace")
        lead = self._pieces.lead
        self._mark = lead.mark
        # Marks that may still be stripped: only as long as no text stands before.
        self._marks_left = 0 if lead.count and any(map(self._piece, reversed(prompt_ids))) else lead.count

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that is final now that ``token_ids`` follow; "" if they complete no character."""
        data = b"".join(map(self._piece, token_ids))
        if self._marks_left and data:
            data = self._strip(data)
        return self._utf8.decode(data)

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was never completed, else ""."""
        return self._utf8.decode(b"", final=True)

    def _piece(self, token_id: int) -> bytes:
        return b"" if token_id in self._skipped else self._pieces[token_id]

    def _strip(self, data: bytes) -> bytes:
        while self._marks_left and data.startswith(self._mark):
            data = data[len(self._mark) :]
            self._marks_left -= 1
        if data:
            self._marks_left = 0
        return data
