"""All that is compiled, by name."""

from __future__ import annotations

from cuda_aot.case import Make
from cuda_aot.kernel_cases import KERNELS
from cuda_aot.step_cases import STEPS
from cuda_aot.targets import Target
from cuda_aot.xla_cases import XLA_OPS

__all__ = ["CASES", "names_for"]

CASES: dict[str, Make] = {**KERNELS, **STEPS, **XLA_OPS}


def names_for(target: Target) -> list[str]:
    """The cases that exist on a chip."""
    return [name for name, make in CASES.items() if make(target) is not None]
