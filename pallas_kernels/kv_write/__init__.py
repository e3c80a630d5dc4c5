"""Writing new keys and values into the block pools, and copying whole blocks."""

from pallas_kernels.kv_write.api import Pools, copy_blocks, kv_write

__all__ = ["Pools", "copy_blocks", "kv_write"]
