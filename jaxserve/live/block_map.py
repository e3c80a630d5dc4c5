"""The map of all blocks: whose each is, and how often it is used; and what of that has changed.

Cell ``i`` is block ``i + 1``: the null block is not on the map. Everything is numpy over the whole map: 100,000 blocks
are drawn in a millisecond.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jaxserve.live.snapshot import Snapshot, Table

__all__ = ["BlockMap", "Changes"]

_MAX_REFS = 255


@dataclass(frozen=True, slots=True, eq=False)
class Changes:
    """The cells that have changed, uint32 [n], and what they hold now: ``owners`` uint16 [n], ``refs`` uint8 [n]."""

    cells: NDArray[np.uint32]
    owners: NDArray[np.uint16]
    refs: NDArray[np.uint8]


class BlockMap:
    """The map as of the newest snapshot that it was shown. One thread at a time.

    Attributes:
        owners: uint16 [blocks]: 0 free, 1 cached (free, with content that can be found), else the key of the first
            request by order of service that uses it.
        refs: uint8 [blocks]: how many requests use it, 255 for more. Neither array is ever written to: each update
            makes new ones.
    """

    def __init__(self, num_blocks: int) -> None:
        """Of so many blocks, the null block not counted, all free."""
        self.owners: NDArray[np.uint16] = np.zeros(num_blocks, np.uint16)
        self.refs: NDArray[np.uint8] = np.zeros(num_blocks, np.uint8)
        # Each table as far as it was read: its list, which tells one table of a request from the next, and its cells.
        self._tables: dict[int, tuple[list[int], NDArray[np.uint32]]] = {}

    def update(self, snapshot: Snapshot) -> Changes:
        """Draw the map anew; what is different now."""
        uses = snapshot.refs[1:]
        refs = np.minimum(uses, _MAX_REFS).astype(np.uint8)
        owners = np.where(uses == 0, snapshot.published[1:], 0).astype(np.uint16)
        known, self._tables = self._tables, {}
        for table in reversed(snapshot.tables):  # so that the first who shares a block comes last
            cells = _cells(table, known.get(table.key))
            self._tables[table.key] = (table.blocks, cells)
            owners[cells] = table.key
        changed = np.flatnonzero((owners != self.owners) | (refs != self.refs)).astype(np.uint32)
        self.owners, self.refs = owners, refs
        return Changes(changed, owners[changed], refs[changed])


def _cells(table: Table, known: tuple[list[int], NDArray[np.uint32]] | None) -> NDArray[np.uint32]:
    """The cells of a table, of which only what was not there before is read."""
    before = known[1] if known is not None and known[0] is table.blocks else np.zeros(0, np.uint32)
    if len(before) == table.num_blocks:
        return before
    fresh = np.array(table.blocks[len(before) : table.num_blocks], np.uint32) - 1
    return np.concatenate([before, fresh]) if len(before) else fresh
