"""The padded sizes of a step: the only file that knows them.

XLA programs have fixed shapes. A step of decodes alone runs in a bucket of as many tokens as rows, one that verifies
drafts as well in a bucket of its token count, and one with prompt chunks in a bucket of its token count with room for
every row. Sizes grow by a half and a third in turn, which bounds the padding by a third and the number of programs by
the logarithm of the largest step.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NO_BUCKET", "Bucket", "Buckets"]

_SMALLEST_MIXED = 32


@dataclass(frozen=True, order=True, slots=True)
class Bucket:
    """Sizes of one forward program.

    Attributes:
        tokens, rows: T and R.
        has_prefill: whether prompt chunks may be among the rows.
        queries: most tokens of a row that attention treats as a decode.
    """

    tokens: int
    rows: int
    has_prefill: bool
    queries: int = 1


NO_BUCKET = Bucket(0, 0, has_prefill=False)
"""That of a step with nothing in it."""


class Buckets:
    """All buckets of an engine.

    Args:
        max_tokens: most tokens of a step.
        max_rows: most rows of a step.
        num_drafts: most drafts of a row.
    """

    def __init__(self, max_tokens: int, max_rows: int, num_drafts: int = 0) -> None:
        self.max_rows = max_rows
        self.queries = 1 + num_drafts
        self.max_places = min(max_tokens, max_rows * self.queries)
        self.rows = _growing(1, max_rows)
        self.places = _growing(1, self.max_places)
        self.mixed_tokens = _growing(min(_SMALLEST_MIXED, max_tokens), max_tokens)

    def forward(self) -> list[Bucket]:
        """Buckets of the forward programs."""
        decodes = [self._decode(rows) for rows in self.rows]
        verifies = [self._verify(tokens) for tokens in self.places if tokens > 1 and self.queries > 1]
        return decodes + verifies + [self._mixed(tokens) for tokens in self.mixed_tokens]

    def pick(self, num_tokens: int, num_rows: int, *, has_prefill: bool) -> Bucket:
        """The smallest bucket that holds a step; without prefill, tokens beyond the rows are drafts."""
        if has_prefill:
            return self._mixed(_at_least(self.mixed_tokens, num_tokens))
        if num_tokens > num_rows:
            return self._verify(_at_least(self.places, num_tokens))
        return self._decode(_at_least(self.rows, num_rows))

    def pick_rows(self, num_rows: int) -> int:
        """Rows of the smallest propose program that holds ``num_rows``."""
        return _at_least(self.rows, num_rows)

    def pick_places(self, num_places: int) -> int:
        """Places of the smallest sample program that holds ``num_places``."""
        return _at_least(self.places, num_places)

    def _decode(self, rows: int) -> Bucket:
        return Bucket(rows, rows, has_prefill=False)

    def _verify(self, tokens: int) -> Bucket:
        return Bucket(tokens, min(tokens, self.max_rows), has_prefill=False, queries=self.queries)

    def _mixed(self, tokens: int) -> Bucket:
        return Bucket(tokens, self.max_rows, has_prefill=True, queries=self.queries)


def _growing(first: int, last: int) -> tuple[int, ...]:
    """Powers of two times ``first`` and the middles between them, up to ``last``: 1, 2, 3, 4, 6, 8, 12, 16, …"""
    sizes = []
    size = first
    while size < last:
        sizes += [size, size * 3 // 2] if size > 1 else [size]
        size *= 2
    return (*(size for size in sizes if size < last), last)


def _at_least(sizes: tuple[int, ...], wanted: int) -> int:
    size = next((size for size in sizes if size >= wanted), None)
    if size is None:  # no StopIteration, which generators take for their end
        raise AssertionError(f"nothing is as large as {wanted}; the largest is {sizes[-1]}")
    return size
