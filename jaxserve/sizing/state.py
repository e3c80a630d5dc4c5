"""What the device keeps of each row between steps, beside KV.

Letters: X rows and a dummy, V vocabulary, C context, D most drafts on a path, K most drafts, Q = 1 + K nodes, P places.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

__all__ = ["Guesses", "draft_bytes", "mask_bytes", "row_arrays", "row_bytes"]

_BYTES = {"int16": 2, "int32": 4, "float32": 4}


def row_arrays(
    num_rows: int, vocab_size: int, history: int = 0, max_depth: int = 0
) -> Mapping[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of each array of ``sampling.RowState``; ``history`` is C, ``max_depth`` D."""
    rows = num_rows + 1
    return {
        "last_token": ((rows,), "int32"),
        "length": ((rows,), "int32"),
        "history": ((rows, history), "int32"),
        "path": ((rows, 1 + max_depth), "int32"),
        "path_length": ((rows,), "int32"),
        "counts": ((rows, vocab_size), "int16"),
        "bias": ((rows, vocab_size), "float32"),
    }


def row_bytes(num_rows: int, vocab_size: int, history: int = 0, max_depth: int = 0) -> int:
    """Bytes of all of them."""
    arrays = row_arrays(num_rows, vocab_size, history, max_depth).values()
    return sum(math.prod(shape) * _BYTES[dtype] for shape, dtype in arrays)


@dataclass(frozen=True, slots=True)
class Guesses:
    """What speculation keeps of rows.

    Attributes:
        num_drafts: K.
        max_depth: D.
        is_tree: whether drafts may have siblings.
        corpus_size: tokens of earlier answers.
        has_cache: whether what guesses has a KV cache.
    """

    num_drafts: int = 0
    max_depth: int = 0
    is_tree: bool = False
    corpus_size: int = 0
    has_cache: bool = False

    def history(self, max_context: int) -> int:
        """C: tokens of a row that are kept on the device for what guesses."""
        return max_context if self.num_drafts else 0


def draft_bytes(num_rows: int, guesses: Guesses) -> int:
    """Bytes of ``speculative.DraftState``, and of what a proposer keeps but for its KV."""
    rows, nodes = num_rows + 1, 1 + guesses.num_drafts
    drafts = rows * guesses.num_drafts * (2 if guesses.is_tree else 1)
    lineage = rows * nodes * -(-nodes // 32) if guesses.is_tree else 0
    corpus = guesses.corpus_size + 1 + rows if guesses.corpus_size else 0
    return 4 * (drafts + lineage + corpus + (rows if guesses.has_cache else 0))


def mask_bytes(places: Iterable[int], vocab_size: int) -> int:
    """Bytes of the masks that allow all tokens, one for each number of places P."""
    return sum(places) * 4 * -(-vocab_size // 32)
