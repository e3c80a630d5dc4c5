"""After a tree of drafts was verified: the KV of right drafts moves to where plain decoding would have put it.

The nodes of a tree lie in the KV cache in their order, so those of the right path have gaps between them. What follows
reads a row's tokens by position: they must lie side by side. A chain's path has no gaps, and nothing is done for it.

Nobody sees KV that has not moved yet. The program is dispatched right behind the step's sampling, hence before the next
step's block copies, writes and reads; and what others may read by then holds settled tokens alone, which are read from
the device after that (``blocks.manager`` publishes below ``known``, and a fork takes prompt tokens only). What moves is
written behind the position of the row's newest token, where no block is shared or published; if the row's blocks have
been given to another request by then, that one's first step comes later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxserve.layers import KVCache
from jaxserve.plan import RowPlan
from jaxserve.runner import programs
from jaxserve.runner.batch import pad_tables
from jaxserve.runner.buckets import Buckets
from jaxserve.runner.compiled import Programs
from jaxserve.sampling import RowState

__all__ = ["Compactor"]


class Compactor:
    """Closes the gaps that rejected drafts leave.

    Args:
        like: KV pools and row state, or their shapes.
        buckets: sizes of steps.
        max_blocks: most blocks of a row.
        backend: that of attention, which says who writes KV.
        is_tree: whether there can be gaps.
    """

    def __init__(
        self, like: tuple[KVCache, RowState], buckets: Buckets, max_blocks: int, *, backend: str, is_tree: bool
    ) -> None:
        self._like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), like)
        self._buckets = buckets
        self._max_blocks = max_blocks
        self._backend = backend
        self._is_tree = is_tree
        self._programs = Programs(self._lower)

    def programs(self) -> Iterator[tuple[Programs, Any]]:
        """Every program that serving may call, as (programs, key)."""
        if self._is_tree:
            yield from ((self._programs, rows) for rows in self._buckets.rows)

    def compact(self, kv: KVCache, rows: RowState, sampling: Sequence[RowPlan]) -> KVCache:
        """The cache after a step whose rows ``sampling`` have just been sampled."""
        verified = [row for row in sampling if row.num_drafts] if self._is_tree else []
        if not verified:
            return kv
        size = self._buckets.pick_rows(len(verified))
        compacted: KVCache = self._programs[size](kv, rows, *self._work(verified, size))
        return compacted

    def _work(self, verified: Sequence[RowPlan], size: int) -> tuple[Any, Any]:
        at = np.full(size, self._buckets.max_rows, np.int32)
        at[: len(verified)] = [row.row for row in verified]
        return at, pad_tables(verified, size, self._max_blocks)

    def _lower(self, size: int) -> jax.stages.Lowered:
        compact = partial(programs.compact, backend=self._backend)
        return jax.jit(compact, donate_argnums=0).lower(*self._like, *self._work([], size))
