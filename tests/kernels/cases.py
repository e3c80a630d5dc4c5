"""Shared cases of paged attention: a ragged batch over a poisoned pool, and a dense float64 answer.

Every backend is tested with the same cases; slots that no row owns hold NaN, and so does nothing of the answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

__all__ = ["AttentionCase"]


@dataclass(frozen=True)
class AttentionCase:
    """A ragged batch: per row (query tokens, tokens in the cache); decodes first."""

    rows: tuple[tuple[int, int], ...]
    block_size: int = 16
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    window: int | None = None
    soft_cap: float | None = None
    tokens: int | None = None  # query tokens with padding; by default a few more than there are
    num_blocks: int | None = None
    max_blocks: int | None = None  # width of the block tables
    seed: int = 0
    arrays: dict[str, NDArray[np.generic]] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        queries, lens = (np.array(x, np.int32) for x in zip(*self.rows, strict=True))
        per_row = -(-lens // self.block_size)
        num_blocks = self.num_blocks or int(per_row.sum()) + 4
        pool = (num_blocks, self.block_size, self.kv_heads, self.head_dim)
        k, v = (np.full(pool, np.nan, np.float32) for _ in range(2))
        ids = rng.permutation(np.arange(1, num_blocks))
        tables = np.zeros((len(lens) + 1, self.max_blocks or int(per_row.max()) + 3), np.int32)
        tokens = self.tokens or int(queries.sum()) + 3
        for row, length in enumerate(lens):
            own, ids = ids[: per_row[row]], ids[per_row[row] :]
            tables[row, : len(own)] = own
            for pool_array in (k, v):
                slots = pool_array[own].reshape(-1, self.kv_heads, self.head_dim)
                slots[:length] = rng.standard_normal((length, self.kv_heads, self.head_dim))
                pool_array[own] = slots.reshape(len(own), *pool[1:])
        starts = np.concatenate([[0], np.cumsum(queries), [queries.sum()]]).astype(np.int32)  # one empty row at the end
        self.arrays.update(
            q=rng.standard_normal((tokens, self.heads, self.head_dim)).astype(np.float32),
            k=k,
            v=v,
            query_start=starts,
            kv_lens=np.append(lens, 0).astype(np.int32),
            block_tables=tables,
            num_decode=np.int32((queries == 1).sum()),
        )

    def expected(self) -> NDArray[np.float64]:
        """The dense answer, row by row, in float64; zeros for padding tokens."""
        a = self.arrays
        out = np.zeros(a["q"].shape)
        group = self.heads // self.kv_heads
        for row, length in enumerate(a["kv_lens"]):
            first, last = a["query_start"][row], a["query_start"][row + 1]
            if first == last:
                continue
            blocks = a["block_tables"][row][: -(-length // self.block_size)]
            k, v = (
                np.repeat(a[x][blocks].reshape(-1, self.kv_heads, self.head_dim)[:length].astype(np.float64), group, 1)
                for x in "kv"
            )
            scores = np.einsum("thd,nhd->htn", a["q"][first:last].astype(np.float64), k) * self.head_dim**-0.5
            if self.soft_cap is not None:
                scores = self.soft_cap * np.tanh(scores / self.soft_cap)
            query_at, key_at = np.arange(length - (last - first), length)[:, None], np.arange(length)
            sees = key_at <= query_at
            if self.window is not None:
                sees &= key_at > query_at - self.window
            scores = np.where(sees, scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[first:last] = np.einsum("htn,nhd->thd", weights / weights.sum(-1, keepdims=True), v)
        return out
