"""How often guesses are right, and which tokens are worth guessing."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Acceptance", "draft_vocabulary", "index_of"]

_MOST_PATHS = 64


@dataclass(frozen=True)
class Acceptance:
    """How often guesses are right, on texts that were not learnt from.

    Attributes:
        right: [K, ranks] share of the positions at which the n-th guess of a token, 1 to K ahead of the next, is right.
        length: expected tokens of a step with the chain of first guesses: 1 and those that are right.
    """

    right: NDArray[np.float64]
    length: float

    def paths(self) -> list[list[int]]:
        """The paths of ranks that are right most often, as if guesses were right independently of each other, as the
        authors of Medusa choose theirs; the best first, and none before its beginning."""
        chances: dict[tuple[int, ...], float] = {(): 1.0}
        open_paths: dict[tuple[int, ...], float] = {(rank,): chance for rank, chance in enumerate(self.right[0])}
        while open_paths and len(chances) <= _MOST_PATHS:
            best = max(open_paths, key=lambda path: (open_paths[path], -len(path)))
            chances[best] = open_paths.pop(best)
            if len(best) < len(self.right):
                ranks = self.right[len(best)]
                open_paths |= {(*best, rank): chances[best] * ranks[rank] for rank in range(len(ranks))}
        return [list(path) for path in itertools.islice(chances, 1, None)]


def draft_vocabulary(targets: NDArray[np.int32], size: int, num_tokens: int) -> NDArray[np.int32] | None:
    """The ``size`` most frequent tokens, of equal ones those with the lowest ids, in the order of ids; None for all.

    A whole number of 64s is taken, which sampling is quickest with.
    """
    size = -(-size // 64) * 64
    if size == 0 or size >= num_tokens:
        return None
    counts = np.bincount(targets[targets >= 0], minlength=num_tokens)
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)


def index_of(vocabulary: NDArray[np.int32] | None) -> Callable[[NDArray[np.int32]], NDArray[np.int32]]:
    """From tokens to logits of a vocabulary; -1 for tokens that it does not have."""
    if vocabulary is None:
        return lambda tokens: tokens

    def find(tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        at = np.minimum(np.searchsorted(vocabulary, tokens), len(vocabulary) - 1)
        return np.where(vocabulary[at] == tokens, at, -1).astype(np.int32)

    return find
