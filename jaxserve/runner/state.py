"""Everything that lives on the device between steps."""

from __future__ import annotations

from flax import struct

from jaxserve.layers import KVCache
from jaxserve.sampling import RowState

__all__ = ["DeviceState"]


@struct.dataclass
class DeviceState:
    """Donated from step to step.

    Attributes:
        kv: the KV pools, written by ``forward``.
        rows: what is remembered of each row, written by ``sample``.
    """

    kv: KVCache
    rows: RowState
