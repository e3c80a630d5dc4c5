"""The padded sizes of a step: the only file that knows them.

XLA programs have fixed shapes. A step of decodes alone runs in a bucket of as many tokens as rows; a step with prompt
chunks in a bucket of its token count with room for every row. Sizes grow by a half and a third in turn, which bounds
the padding by a third and the number of programs by the logarithm of the largest step.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Bucket", "Buckets"]

_SMALLEST_MIXED = 32


@dataclass(frozen=True, order=True, slots=True)
class Bucket:
    """Sizes of one forward program: T tokens, R rows; whether prompt chunks may be among them."""

    tokens: int
    rows: int
    has_prefill: bool


class Buckets:
    """All buckets of an engine.

    Args:
        max_tokens: most tokens of a step.
        max_rows: most rows of a step.
    """

    def __init__(self, max_tokens: int, max_rows: int) -> None:
        self.rows = _growing(1, max_rows)
        self.mixed_tokens = _growing(min(_SMALLEST_MIXED, max_tokens), max_tokens)
        self.max_rows = max_rows

    def forward(self) -> list[Bucket]:
        """Buckets of the forward programs."""
        decodes = [Bucket(rows, rows, has_prefill=False) for rows in self.rows]
        return decodes + [Bucket(tokens, self.max_rows, has_prefill=True) for tokens in self.mixed_tokens]

    def pick(self, num_tokens: int, num_rows: int, *, has_prefill: bool) -> Bucket:
        """The smallest bucket that holds a step."""
        if has_prefill:
            return Bucket(_at_least(self.mixed_tokens, num_tokens), self.max_rows, has_prefill=True)
        rows = _at_least(self.rows, num_rows)
        return Bucket(rows, rows, has_prefill=False)

    def pick_rows(self, num_rows: int) -> int:
        """Rows of the smallest sample program that holds ``num_rows``."""
        return _at_least(self.rows, num_rows)


def _growing(first: int, last: int) -> tuple[int, ...]:
    """Powers of two times ``first`` and the middles between them, up to ``last``: 1, 2, 3, 4, 6, 8, 12, 16, …"""
    sizes = []
    size = first
    while size < last:
        sizes += [size, size * 3 // 2] if size > 1 else [size]
        size *= 2
    return (*(size for size in sizes if size < last), last)


def _at_least(sizes: tuple[int, ...], wanted: int) -> int:
    return next(size for size in sizes if size >= wanted)
