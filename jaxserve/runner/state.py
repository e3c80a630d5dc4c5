"""Everything that lives on the device between steps."""

from __future__ import annotations

from flax import struct

from jaxserve.layers import KVCache
from jaxserve.sampling import RowState

__all__ = ["DeviceState"]


@struct.dataclass
class DeviceState:
    """Donated from step to step: the KV pools, written by ``forward``, and the rows, written by ``sample``."""

    kv: KVCache
    rows: RowState
