"""What XLA made of a whole program: memory, launches, CUDA graphs, and copies that should not be there."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

from cuda_aot.reports import Program

__all__ = ["copies_of", "launch_shared", "read_program"]

# "    016: kCustomKernel [prev=…] paged_attention_decode grid: […] threads: […]  shared_memory: 20736 bytes"
_THUNK = re.compile(r"^(\s*)\d+: (k\w+)\s*\[[^\]]*\]\s*(\S*)(?:.*shared_memory: (\d+) bytes)?", re.MULTILINE)
_COUNTED = re.compile(r"(?:_\d+)+_?$")  # what makes names unique
_INNER = {"kCommandBuffer", "kWhile", "kConditional", "kSequential"}  # hold other thunks, launch nothing themselves


def read_program(compiled: Any, dump: Path, pool: str | None) -> Program:
    """Read a ``jax.stages.Compiled`` and the folder that its compilation was dumped to.

    ``pool`` is the shape of a KV pool as HLO writes it, e.g. bf16[4096,16,8,128].
    """
    memory = compiled.memory_analysis()
    thunks = _thunks(dump)
    launches = Counter(_COUNTED.sub("", name) or kind for _, kind, name, _ in thunks if kind not in _INNER)
    return Program(
        argument_bytes=memory.argument_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        pool_copies=() if pool is None else copies_of(pool, compiled.as_text()),
        launches=dict(launches),
        steps=dict(Counter(kind for indent, kind, _, _ in thunks if not indent)),
    )


def launch_shared(dump: Path) -> dict[str, int]:
    """Dynamic shared memory of each kernel's launches, bytes."""
    return {name: int(shared) for _, _, name, shared in _thunks(dump) if shared}


def _thunks(dump: Path) -> list[tuple[str, str, str, str]]:
    """(indentation, kind, name, shared bytes) of everything that is run, as the last pass leaves it."""
    # The second file exists only if a pass changed something: put launches into CUDA graphs, above all.
    for ending in ("thunk_sequence_after_thunk_passes.txt", "thunk_sequence.txt"):
        for path in dump.glob(f"*{ending}"):
            return _THUNK.findall(path.read_text())
    raise FileNotFoundError(f"XLA left no list of launches in {dump}")


def copies_of(pool: str, hlo: str) -> tuple[str, ...]:
    """Instructions that copy a whole array of the pool's shape."""
    pattern = re.compile(
        rf"^\s*(?:ROOT )?%?(\S+) = \(?{re.escape(pool)}\S* (?:[^=]*\) )?copy(?:-start)?\(", re.MULTILINE
    )
    return tuple(pattern.findall(hlo))
