"""From work to time: how long a chip needs at least."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jaxserve.roofline.chips import Chip
from jaxserve.roofline.work import StepShape, Work

__all__ = ["Bound", "kernels_bound", "step_bound"]


@dataclass(frozen=True, slots=True)
class Bound:
    """A lower bound on time.

    Attributes:
        memory_seconds: what moving the bytes takes.
        compute_seconds: what the operations take.
        seconds: the bound.
    """

    memory_seconds: float
    compute_seconds: float
    seconds: float

    @property
    def is_memory_bound(self) -> bool:
        """Whether the bytes take longer than the operations."""
        return self.memory_seconds >= self.compute_seconds

    def generated_per_second(self, step: StepShape) -> float:
        """Most tokens per second that decodes generate: with drafts, if all are accepted."""
        return step.decodes * (1 + step.drafts) / self.seconds

    def prompt_per_second(self, step: StepShape) -> float:
        """Most prompt tokens per second."""
        return step.chunk / self.seconds


def step_bound(works: Iterable[Work], chip: Chip, dtype: str) -> Bound:
    """What no program can beat: every weight and every cached key read once, operations at full speed meanwhile.

    ``dtype`` is what products are computed in (``Precision.activations``).
    """
    works = tuple(works)
    moved = sum(work.count * (work.weight_bytes + work.kv_bytes) for work in works)
    memory = moved / chip.bandwidth
    compute = sum(work.count * work.operations for work in works) / chip.speed(dtype)
    return Bound(memory, compute, max(memory, compute))


def kernels_bound(works: Iterable[Work], chip: Chip, dtype: str) -> Bound:
    """What these kernels cannot beat, one after the other, with activations through memory between them."""
    memory = compute = seconds = 0.0
    for work in works:
        moving = work.count * work.bytes / chip.bandwidth
        computing = work.count * work.operations / chip.speed(dtype)
        memory, compute, seconds = memory + moving, compute + computing, seconds + max(moving, computing)
    return Bound(memory, compute, seconds)
