"""Products with weights that lie packed in panels, in floats or in GGUF's blocks."""

from pallas_kernels.packed_matmul.api import Backend, packed_matmul, select_backend
from pallas_kernels.packed_matmul.format import (
    GROUP,
    PANEL,
    PackedWeight,
    pack,
    pack_int4,
    pack_int8,
    take_columns,
    unpack,
)

__all__ = [
    "GROUP",
    "PANEL",
    "Backend",
    "PackedWeight",
    "pack",
    "pack_int4",
    "pack_int8",
    "packed_matmul",
    "select_backend",
    "take_columns",
    "unpack",
]
