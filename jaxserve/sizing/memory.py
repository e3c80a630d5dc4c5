"""The memory of a device, and the share of it that KV may have."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jaxserve.errors import ConfigError

__all__ = ["Memory", "cpu_memory", "cpu_room", "free_ram", "gpu_memory", "gpu_room", "total_ram"]

_CPU_SHARE = 0.25
_CPU_LIMIT = 4 << 30

_FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
_FRACTION = 0.75  # what JAX reserves of a GPU, unless told otherwise


@dataclass(frozen=True, slots=True)
class Memory:
    """What a process can have of a device's memory.

    Attributes:
        total: bytes of the device.
        limit: bytes that the process can have.
        reason: why these.
        on_cpu: whether it is the host's own.
        is_default: whether nobody has said how much of it the process can have.
    """

    total: int
    limit: int
    reason: str
    on_cpu: bool
    is_default: bool = False

    def room(self, held: int, utilization: float) -> tuple[int, str]:
        """Bytes for KV beside the ``held`` ones of weights and adapters, and by which rule."""
        if self.on_cpu:
            return cpu_room(self.limit - held)
        return gpu_room(self.limit, held, utilization)


def gpu_memory(total: int, environment: Mapping[str, str]) -> Memory:
    """An accelerator of ``total`` bytes, of which JAX reserves what the environment says, or three quarters."""
    for name in _FRACTIONS:
        if not (text := environment.get(name)):
            continue
        try:
            fraction = float(text)
        except ValueError:
            fraction = 0.0
        if not 0 < fraction <= 1:
            raise ConfigError(f"the environment variable {name} must be a number above 0, at most 1, got {text!r}.")
        return Memory(total, int(total * fraction), f"{name}={text}", on_cpu=False)
    reason = f"JAX reserves {_FRACTION:.0%} of a GPU by default"
    return Memory(total, int(total * _FRACTION), reason, on_cpu=False, is_default=True)


def cpu_memory() -> Memory:
    """This machine's own."""
    return Memory(total_ram(), free_ram(), "free on this machine now", on_cpu=True)


def gpu_room(limit: int, held: int, utilization: float) -> tuple[int, str]:
    """Bytes for KV on an accelerator where ``held`` of ``limit`` bytes are taken, and by which rule."""
    return int(limit * utilization) - held, f"--gpu-memory-utilization {utilization:g}"


def cpu_room(free: int) -> tuple[int, str]:
    """Bytes for KV on a CPU of which ``free`` bytes are free, and by which rule."""
    share = min(int(free * _CPU_SHARE), _CPU_LIMIT)
    return share, f"{_CPU_SHARE:.0%} of free memory, at most {_CPU_LIMIT >> 30} GiB"


def free_ram() -> int:
    """Bytes that a process can still have; Linux counts among them what caches files and can be dropped."""
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file() and (found := re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())):
        return int(found[1]) << 10
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def total_ram() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
