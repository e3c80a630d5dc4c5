"""Sessions of given contexts in a pool of blocks, and in the contiguous regions that it replaces.

A server with contiguous memory reserves a region of the longest context for every session; one with blocks wastes what
is left of each session's last block (Kwon et al. 2023, "PagedAttention", arXiv:2309.06180).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Kept", "Mix", "mix_of"]


@dataclass(frozen=True, slots=True)
class Kept:
    """One way to keep a session.

    Attributes:
        tokens: room that a session takes, tokens, on average.
        wasted: share of it in which nothing is.
        sessions: that fit at once.
    """

    tokens: float
    wasted: float
    sessions: int


@dataclass(frozen=True, slots=True)
class Mix:
    """Sessions of these contexts, equally many of each.

    Attributes:
        contexts: tokens of each.
        kv_bytes: of a session's tokens, on average.
        blocks: that a session takes, on average.
        paged, contiguous: what they take in blocks, and in regions of the longest context.
    """

    contexts: tuple[int, ...]
    kv_bytes: int
    blocks: float
    paged: Kept
    contiguous: Kept

    @property
    def mean(self) -> float:
        """Tokens of a session."""
        return sum(self.contexts) / len(self.contexts)


def mix_of(contexts: Sequence[int], *, num_blocks: int, block_size: int, max_context: int, token_bytes: int) -> Mix:
    """Sessions of ``contexts`` in a pool of ``num_blocks``, the null block included; none is longer than
    ``max_context``."""
    usable, count = num_blocks - 1, len(contexts)
    blocks, tokens = sum(-(-context // block_size) for context in contexts), sum(contexts)
    region = -(-max_context // block_size)

    def kept(of_all: int) -> Kept:
        room = of_all * block_size
        return Kept(room / count, 1 - tokens / room, usable * count // of_all)

    return Mix(tuple(contexts), token_bytes * tokens // count, blocks / count, kept(blocks), kept(region * count))
