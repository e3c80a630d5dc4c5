"""Which adapter has which slot of the device's bank, and which requests may therefore start.

A request starts when its adapter is in a slot, and holds the slot while it runs. An adapter that has none gets a free
slot, or that of the adapter which nobody has used for longest; until it is there (files are read by another thread, and
copied between steps piece by piece) its requests wait, and let all others pass.

Why none starves. Where every slot is held, the first request that finds none lets later ones start that hold slots
already, but only until its patience is gone. Then one slot is *closed* for it: requests behind it get no hold of that
one. Those that have it end, and the slot is the request's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jaxserve.errors import LoadError
from jaxserve.request import Request
from jaxserve.scheduler.admission import Patience
from jaxserve.timings import ADAPTER_EDGES, Timings

__all__ = ["AdapterSlots", "AdapterSource"]


class AdapterSource(Protocol):
    """Where adapters come from; ``key`` is the digest of one's content."""

    def is_live(self, key: bytes) -> bool:
        """Whether anybody may still ask for it."""

    def fetch(self, key: bytes) -> Sequence[Any] | None:
        """The pieces to be copied into a slot; None while they are made ready, which the first call begins.

        Raises LoadError: it cannot be read.
        """

    def forget(self, key: bytes) -> None:
        """What was asked for will not be fetched, for now at least."""


@dataclass(slots=True, eq=False)
class _Slot:
    """One slot: whose it is and since when, how many running requests hold it, and what is left to copy (None: all)."""

    number: int
    key: bytes | None = None
    given_at: float = 0.0
    holders: int = 0
    wanted_by: Request | None = None
    pieces: list[Any] | None = None
    is_ready: bool = False
    used_at: int = 0

    @property
    def is_free(self) -> bool:
        """Whether it may be given to another adapter: nobody holds it, nor waits for what is being copied to it."""
        return not self.holders and (self.wanted_by is None or self.wanted_by.finish is not None)


class AdapterSlots:
    """An admission rule.

    Args:
        num_slots: slots 1 to ``num_slots``; 0 stands for the base model.
        source: where adapters come from.
        place: copies a piece into a slot, before the step that is being planned.
        refuse: ends a request whose adapter cannot be read.
        patience: how long the first request without a slot lets others overtake it.

    Attributes:
        evictions_total: adapters that gave up their slot to another one.
        load_seconds: how long it took from the request for a slot until the adapter was in it.
    """

    holds_place = False

    def __init__(
        self,
        num_slots: int,
        source: AdapterSource,
        *,
        place: Callable[[int, Any], None],
        refuse: Callable[[str, str], None],
        patience: Patience | None = None,
    ) -> None:
        self._slots = [_Slot(number) for number in range(1, num_slots + 1)]
        self._by_key: dict[bytes, _Slot] = {}
        self._source = source
        self._place = place
        self._refuse = refuse
        self._patience = patience or Patience()
        self._head: Request | None = None  # the first that found no slot in this step
        self._closed: tuple[_Slot, Request] | None = None
        self._behind = False  # whether whoever is asked about comes after the one for whom a slot is closed
        self._awaited = False  # whether somebody before them waits until that slot is filled
        self._clock = 0
        self.evictions_total = 0
        self.load_seconds = Timings(ADAPTER_EDGES)

    @property
    def held(self) -> set[bytes]:
        """Adapters of running requests; may be read from any thread."""
        return {slot.key for slot in self._slots if slot.key is not None and slot.holders}

    @property
    def resident(self) -> dict[bytes, int]:
        """Adapters that are in a slot, wholly, and the slots' numbers; may be read from any thread."""
        return {slot.key: slot.number for slot in self._slots if slot.key is not None and slot.is_ready}

    def begin_step(self, running: Collection[Request]) -> None:
        """Copy a piece, or, where nobody would wait for it, all that there is."""
        self._clock += 1
        self._head, self._behind, self._awaited = None, False, False
        if self._closed is not None and self._closed[1].finish is not None:
            self._closed = None
        for slot in sorted(self._slots, key=lambda slot: slot.given_at):  # in turn, or one slot could wait for ever
            if slot.key is not None and not slot.is_ready and self._fill(slot, whole=not running):
                return

    def admits(self, request: Request, running: Collection[Request]) -> bool:
        """Whether the request's adapter is in a slot that it may hold."""
        if request.adapter is None:
            return True
        slot = self._by_key.get(request.adapter)
        if self._closed is not None and request is self._closed[1]:
            self._behind = True
            if slot is not None:  # another request has brought it
                self._closed = None
        if slot is None:
            self._find_slot(request)
            return False
        if self._closed is not None and self._closed[0] is slot:
            if self._behind:
                return False
            self._awaited = True
        if slot.is_free:
            slot.wanted_by = request
        return slot.is_ready

    def note_admitted(self, request: Request) -> None:
        """The request holds its slot."""
        if request.adapter is None:
            return
        slot = self._by_key[request.adapter]
        slot.holders += 1
        slot.used_at = self._clock
        slot.wanted_by = None
        request.adapter_slot = slot.number
        if self._head is not None:
            self._patience.note_overtaken()

    def note_released(self, request: Request) -> None:
        """The request holds it no longer."""
        if request.adapter is not None:
            self._by_key[request.adapter].holders -= 1
            request.adapter_slot = 0

    # --- parts

    def _find_slot(self, request: Request) -> None:
        """Give the request's adapter a slot, if there is one to be given."""
        assert request.adapter is not None
        closed, owner = self._closed or (None, None)
        free = [slot for slot in self._slots if slot.is_free and slot is not closed]
        if owner is request and closed is not None and not closed.holders and not self._awaited:
            free.append(closed)  # whoever waits for it is behind
        if free:
            slot = min(free, key=lambda slot: (slot.key is not None and self._source.is_live(slot.key), slot.used_at))
            self._give(slot, request)
            if owner is request:
                self._closed = None
        elif self._head is None:
            self._head = request
            self._patience.note_blocked(request)
            if self._closed is None and self._patience.exhausted:
                slot = min(self._slots, key=lambda slot: (not slot.holders, slot.holders, slot.used_at))
                self._closed, self._behind = (slot, request), True

    def _give(self, slot: _Slot, request: Request) -> None:
        if slot.key is not None:
            del self._by_key[slot.key]
            if not slot.is_ready and slot.pieces is None:
                self._source.forget(slot.key)
            self.evictions_total += self._source.is_live(slot.key)
        assert request.adapter is not None
        slot.key, slot.wanted_by, slot.pieces, slot.is_ready = request.adapter, request, None, False
        slot.used_at, slot.given_at = self._clock, time.monotonic()
        self._by_key[request.adapter] = slot

    def _fill(self, slot: _Slot, *, whole: bool) -> bool:
        """Copy what is next; whether anything was."""
        assert slot.key is not None
        if slot.pieces is None:
            try:
                pieces = self._source.fetch(slot.key)
            except LoadError as error:
                if slot.wanted_by is not None:
                    self._refuse(slot.wanted_by.id, str(error))
                del self._by_key[slot.key]
                slot.key = slot.wanted_by = None
                return False
            if pieces is None:
                return False
            slot.pieces = list(pieces)
        count = len(slot.pieces) if whole else 1
        for piece in slot.pieces[:count]:
            self._place(slot.number, piece)
        del slot.pieces[:count]
        if not slot.pieces:
            slot.pieces, slot.is_ready = None, True
            self.load_seconds.add(time.monotonic() - slot.given_at)
        return True
