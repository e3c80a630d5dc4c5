"""What an engine shows of itself while it works. Host side, pure Python and numpy.

``snapshot`` is one moment as plain data, ``recorder`` makes it on the engine's thread, ``block_map`` draws it and tells
what has changed since the one before, ``latency`` keeps what clients wait for while somebody looks, and ``journal``
knows every request, and the newest ones that have ended.
"""

from __future__ import annotations

from jaxserve.live.block_map import BlockMap, Changes
from jaxserve.live.journal import Entry, Journal, Part, Report
from jaxserve.live.latency import Latency, percentiles
from jaxserve.live.recorder import Recorder
from jaxserve.live.snapshot import MAX_REQUESTS, MAX_STEPS, EngineShape, RequestRow, Snapshot, StepRow, Table

__all__ = [
    "MAX_REQUESTS",
    "MAX_STEPS",
    "BlockMap",
    "Changes",
    "EngineShape",
    "Entry",
    "Journal",
    "Latency",
    "Part",
    "Recorder",
    "Report",
    "RequestRow",
    "Snapshot",
    "StepRow",
    "Table",
    "percentiles",
]
