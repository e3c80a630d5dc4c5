"""What is known of a compiled case, as values that travel from a worker as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Kernel", "Program", "Report"]


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel's resources, by the assembler's account, and what its PTX holds.

    Attributes:
        name: of its entry.
        threads: per block.
        registers: per thread.
        shared: bytes of shared memory per block, static and dynamic.
        stack: bytes of local memory per thread.
        spills: bytes of registers stored to local memory, for want of registers.
        resident: blocks that run on a multiprocessor at once.
        matrix: instructions of matrix units, name -> how often they stand in the text.
        copies: instructions that copy to shared memory asynchronously, likewise.
    """

    name: str
    threads: int
    registers: int
    shared: int
    stack: int
    spills: int
    resident: int
    matrix: dict[str, int]
    copies: dict[str, int]


@dataclass(frozen=True, slots=True)
class Program:
    """A whole program.

    Attributes:
        argument_bytes: of everything that goes in.
        alias_bytes: of outputs that take the place of a donated input.
        temp_bytes: of scratch memory.
        pool_copies: instructions that copy something of a pool's shape.
        launches: kernels of one run, by the name of what they compute.
        steps: what the host has to start, by kind; one command buffer if the program is one CUDA graph.
    """

    argument_bytes: int
    alias_bytes: int
    temp_bytes: int
    pool_copies: tuple[str, ...]
    launches: dict[str, int]
    steps: dict[str, int]


@dataclass(frozen=True, slots=True)
class Report:
    """One case on one target; ``error`` says why it did not compile."""

    case: str
    target: str
    seconds: float
    error: str | None = None
    kernels: tuple[Kernel, ...] = ()
    program: Program | None = None
    expected: dict[str, int] | None = None
    """What a program was told beforehand: kv_bytes, layers, temp_limit."""

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Report:
        """The inverse of ``to_json``."""
        kernels = tuple(Kernel(**kernel) for kernel in data["kernels"])
        program = data["program"]
        if program is not None:
            program = Program(**{**program, "pool_copies": tuple(program["pool_copies"])})
        return cls(**{**data, "kernels": kernels, "program": program})
