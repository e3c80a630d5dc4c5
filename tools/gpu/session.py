"""What all sections need to know: the clock, the chip, and how kernels are called."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import jax

from jaxserve.roofline import CHIPS, Chip
from pallas_kernels import lora_matmul, packed_matmul, paged_attention
from pallas_kernels.lora_matmul import triton as lora_triton
from pallas_kernels.packed_matmul import triton as packed_triton
from pallas_kernels.paged_attention import mosaic as attention_mosaic
from pallas_kernels.paged_attention import triton as attention_triton

__all__ = ["Clock", "Session", "chip_of", "open_session", "short"]

# For the interpreter.
_DECODE, _PREFILL = attention_triton.Sizes(16, 32, 4, 2), attention_triton.Sizes(32, 32, 4, 2)
_PACKED = packed_triton.Sizes(columns=32, tokens=64, groups=4, splits=3, num_warps=4, num_stages=2)
_LORA = lora_triton.Sizes(inputs=64, columns=32, num_warps=4, num_stages=2)


class Clock:
    """Counts a budget down.

    Args:
        budget: seconds in all, from now on.
    """

    def __init__(self, budget: float) -> None:
        self._budget = budget
        self._began = time.monotonic()

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    @property
    def left(self) -> float:
        """Seconds that are left of the budget."""
        return self._budget - self.spent


@dataclass(slots=True)
class Session:
    """One run.

    Attributes:
        dry: there is no GPU: tiny shapes, and kernels by Pallas' interpreter.
        clock: the run's budget.
        chip: what is measured against. Its bandwidth is the data sheet's until a section has measured it.
        attention, packed_matmul, lora_matmul: the Triton backends of the operations.
        mosaic: the Mosaic backend of attention; None where it cannot be used.
        no_mosaic: why it cannot.
        compiler_options: for programs that hold Pallas kernels.
        threads: that compile at once.
    """

    dry: bool
    clock: Clock
    chip: Chip
    attention: paged_attention.Backend = attention_triton.paged_attention
    packed_matmul: packed_matmul.Backend = packed_triton.packed_matmul
    lora_matmul: lora_matmul.Backend = lora_triton.lora_matmul
    mosaic: paged_attention.Backend | None = None
    no_mosaic: str | None = None
    compiler_options: dict[str, Any] = field(default_factory=dict)
    threads: int = 8

    def compile(self, function: Callable[..., Any], *args: Any) -> jax.stages.Compiled:
        """Compile a function that calls Pallas kernels, for these arguments."""
        return jax.jit(function).lower(*args).compile(self.compiler_options)

    def measured_bandwidth(self, bandwidth: float) -> None:
        """From now on, bytes per second are compared with this."""
        self.chip = replace(self.chip, bandwidth=bandwidth)

    def moved(self, num_bytes: float, seconds: float) -> dict[str, float]:
        """Figures of something that moved bytes in some time."""
        rate = num_bytes / seconds
        return {"µs": 1e6 * seconds, "GB/s": rate / 1e9, "% of copy": 100 * rate / self.chip.bandwidth}


def open_session(budget: float, *, dry: bool) -> Session:
    """A session on the default device; dry, on the CPU, where interpreted loops take long to compile."""
    clock = Clock(budget)
    if not dry:
        reason = attention_mosaic.refuse(128, "bfloat16")
        mosaic = attention_mosaic.paged_attention if reason is None else None
        return Session(False, clock, chip_of(jax.devices()[0].device_kind), mosaic=mosaic, no_mosaic=reason)
    mosaic, reason = _interpreted_mosaic()
    return Session(
        True,
        clock,
        CHIPS["cpu"],
        partial(attention_triton.paged_attention, decode=_DECODE, prefill=_PREFILL, interpret=True),
        partial(packed_triton.packed_matmul, sizes=_PACKED, interpret=True),
        partial(lora_triton.lora_matmul, sizes=_LORA, interpret=True),
        mosaic,
        reason,
        {"xla_backend_optimization_level": 0},
        threads=2,
    )


def _interpreted_mosaic() -> tuple[paged_attention.Backend | None, str | None]:
    """The Mosaic backend in its interpreter, or why there is none."""
    if jax.__version_info__ < (0, 11):
        return None, f"its interpreter comes with jax 0.11, and this is {jax.__version__}"
    from jax.experimental.pallas import mosaic_gpu  # jax 0.10's cannot always be imported

    return partial(attention_mosaic.paged_attention, interpret=mosaic_gpu.InterpretGPUParams()), None


def chip_of(device_kind: str) -> Chip:
    """The chip that a device is; one that has no data sheet here can be compared with measurements only."""
    words = re.findall(r"[a-z0-9]+", device_kind.lower())
    known = next((chip for name, chip in CHIPS.items() if name in words), None)
    return known or Chip(device_kind, math.nan, 0, MappingProxyType({"bfloat16": math.inf}))


def short(error: Exception) -> str:
    """An exception in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"
