"""Chips, by the figures of their data sheets: what they can do at most, not what a program reaches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["CHIPS", "Chip"]


@dataclass(frozen=True, slots=True)
class Chip:
    """A processor and its memory.

    Attributes:
        name: as people know it.
        bandwidth: of its memory, bytes per second.
        memory: bytes.
        speeds: name of a dtype -> operations per second of matrix products of it (a multiplication and an addition
            are two).
    """

    name: str
    bandwidth: float
    memory: int
    speeds: Mapping[str, float]

    def speed(self, dtype: str) -> float:
        """Operations per second of products of ``dtype``; raises ValueError if it has no units for them."""
        if dtype not in self.speeds:
            raise ValueError(f"{self.name} has no speed for {dtype}, but for {', '.join(self.speeds)}")
        return self.speeds[dtype]


def _gpu(name: str, bandwidth: float, gigabytes: int, half: float, one_byte: float, tf32: float) -> Chip:
    """A GPU; speeds are of dense products. Products of float32 are those of TF32, which is XLA's default."""
    speeds = {"float32": tf32, "bfloat16": half, "float16": half, "int8": one_byte}
    return Chip(name, bandwidth, gigabytes * 10**9, MappingProxyType(speeds))


def _with_float8(chip: Chip) -> Chip:
    speeds = {**chip.speeds, "float8_e4m3fn": chip.speeds["int8"], "float8_e5m2": chip.speeds["int8"]}
    return Chip(chip.name, chip.bandwidth, chip.memory, MappingProxyType(speeds))


# Data sheets give speeds of matrix units with sparsity, which is twice the dense speed, where they say so.
CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        # NVIDIA H100 Tensor Core GPU data sheet, H100 SXM: 3.35 TB/s, 80 GB; sparse: 1979 BF16, 3958 INT8 and FP8,
        # 989 TF32.
        "h100": _with_float8(_gpu("H100 SXM", 3.35e12, 80, 989.5e12, 1979e12, 494.5e12)),
        # NVIDIA H200 Tensor Core GPU data sheet, H200 SXM: 4.8 TB/s, 141 GB; the H100's units.
        "h200": _with_float8(_gpu("H200 SXM", 4.8e12, 141, 989.5e12, 1979e12, 494.5e12)),
        # NVIDIA A100 Tensor Core GPU data sheet, A100 80GB SXM: 2039 GB/s; dense: 312 BF16, 624 INT8, 156 TF32; no FP8.
        "a100": _gpu("A100 80GB SXM", 2.039e12, 80, 312e12, 624e12, 156e12),
        # NVIDIA L4 Tensor Core GPU data sheet: 300 GB/s, 24 GB; sparse: 242 BF16, 485 INT8 and FP8, 120 TF32.
        "l4": _with_float8(_gpu("L4", 0.3e12, 24, 121e12, 242.5e12, 60e12)),
        # The two cores of docs/performance.md, measured: 19 to 23 GB/s read by two threads, 175 to 190 GFLOP/s of
        # float32. Other dtypes are widened to float32 there.
        "cpu": Chip(
            "2 cores of an AMD EPYC (Zen 3)",
            23e9,
            23 * 10**9,
            MappingProxyType({"float32": 190e9, "bfloat16": 190e9, "float16": 190e9}),
        ),
    }
)
