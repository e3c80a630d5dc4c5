"""The bank of adapters on the device, and who of a step's rows uses it.

A step in which no row has an adapter gets None, and runs a program that knows nothing of adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxserve.logging import get_logger
from jaxserve.lora.bank import Bank, LoraInput, put
from jaxserve.lora.layout import Layout, Piece, TablePiece
from jaxserve.plan import RowPlan
from jaxserve.runner.compiled import Programs
from jaxserve.runner.memory import no_room
from pallas_kernels.lora_matmul import select_backend

__all__ = ["Adapters"]

_log = get_logger(__name__)


class Adapters:
    """Holds the bank.

    Args:
        layout: where factors lie; None if there are no adapters.
        num_slots: how many adapters the bank holds.

    Attributes:
        num_bytes: of the bank.
    """

    def __init__(self, layout: Layout | None = None, num_slots: int = 0) -> None:
        self._layout = layout
        self._bank = None if layout is None else _empty(layout, num_slots)
        self.num_bytes = 0 if self._bank is None else self._bank.num_bytes
        self._put = Programs(self._lower)

    @property
    def changes_layers(self) -> bool:
        """Whether there are forward programs with adapters."""
        return self._bank is not None

    @property
    def changes_head(self) -> bool:
        """Whether there are sample programs with adapters."""
        return self._layout is not None and self._layout.has_tables

    def programs(self) -> Iterator[tuple[Programs, Any]]:
        """Those that fill slots, as (programs, key)."""
        if self.changes_layers:
            yield self._put, "layers"
        if self.changes_head:
            yield self._put, "tables"

    def place(self, slot: int, piece: Piece | TablePiece) -> None:
        """Dispatch the copy of a piece of an adapter into a slot: steps that are dispatched later find it there."""
        kind = "layers" if isinstance(piece, Piece) else "tables"
        self._bank = self._put[kind](self._bank, np.int32(slot), piece)

    def of_rows(self, rows: Sequence[RowPlan], size: int) -> LoraInput | None:
        """What a forward pass over ``rows``, padded to ``size``, takes; None if none of them has an adapter."""
        return self._input([row.adapter_slot for row in rows], size)

    def of_places(self, rows: Sequence[RowPlan], size: int) -> LoraInput | None:
        """The same of sampling at the rows' places; None also if no adapter changes the output head."""
        if not self.changes_head:
            return None
        return self._input([row.adapter_slot for row in rows for _ in range(1 + row.num_drafts)], size)

    def of_tokens(self, slots: Sequence[int]) -> LoraInput | None:
        """The same of tokens with these slots, each for itself."""
        return self._input(list(slots), len(slots)) if self.changes_head else None

    def like(self, size: int) -> LoraInput:
        """Input of that size, to lower programs with."""
        assert self._bank is not None
        return LoraInput(self._bank, np.zeros(size, np.int32))

    def arrays(self) -> Any:
        """All that it holds on the device."""
        return self._bank

    def _input(self, slots: list[int], size: int) -> LoraInput | None:
        if self._bank is None or not any(slots):
            return None
        return LoraInput(self._bank, np.array(slots + [0] * (size - len(slots)), np.int32))

    def _lower(self, kind: str) -> jax.stages.Lowered:
        assert self._layout is not None
        piece = next(self._layout.pieces({})) if kind == "layers" else self._layout.table_piece({})
        return jax.jit(put, donate_argnums=0).lower(self._bank, np.int32(1), piece)


def _empty(layout: Layout, num_slots: int) -> Bank:
    backend, why = select_backend("auto")
    with no_room(
        f"no room: {num_slots} slots for adapters (--max-loras) of rank {layout.max_rank} (--max-lora-rank) take "
        f"{num_slots * layout.slot_bytes / 2**20:.0f} MiB, which the device does not have."
    ):
        bank = Bank.zeros(layout, num_slots, backend)
    _log.info(
        "%d slots for adapters of rank %d, %s: %.1f MiB; products by %s (%s)",
        num_slots,
        layout.max_rank,
        layout.dtype.name,
        bank.num_bytes / 2**20,
        backend,
        why,
    )
    return bank
