"""What a kernel uses, by the assembler's own account, and which instructions its PTX holds."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from cuda_aot.reports import Kernel
from cuda_aot.targets import Target
from cuda_aot.toolchain import ptxas

__all__ = ["read_kernels"]

_ENTRY = re.compile(r"\.entry\s+(\w+)")
_THREADS = re.compile(r"\.(?:reqntid|maxntid)\s+(\d+)(?:,\s*(\d+))?(?:,\s*(\d+))?")
# mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32, wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16
# Mosaic's stand behind a brace or another instruction
_MATRIX = re.compile(r"(?:^|[;{])\s*(?:@\S+\s+)?(wgmma|mma)\.\S*?(m\d+n\d+k\d+)", re.MULTILINE)
# cp.async.cg.shared.global copies 16 bytes past the first-level cache; cp.async.bulk.tensor is Hopper's TMA
_COPY = re.compile(
    r"^\s*(?:@\S+\s+)?(cp\.async\.(?:ca|cg|bulk\.tensor|bulk)(?=\.)(?!\.(?:commit|wait)_group))", re.MULTILINE
)
# Mosaic writes PTX for the newest assembler that XLA knows, which is not the pinned one.
_VERSION = re.compile(r"^\.version .*", re.MULTILINE)
_PTX_VERSION = "8.8"  # of CUDA 12.9
_LIMITS = {
    "registers": re.compile(r"Used (\d+) registers"),
    "shared": re.compile(r"(\d+) bytes smem"),
    "stack": re.compile(r"(\d+) bytes stack frame"),
    "spills": re.compile(r"(\d+) bytes spill stores"),
}


def read_kernels(ptx: Iterable[Path], target: Target, shared: Mapping[str, int]) -> tuple[Kernel, ...]:
    """Kernels of PTX files with one entry each; ``shared`` is what their launches add, in bytes by name of entry."""
    return tuple(_read(path, target, shared) for path in ptx)


def _read(path: Path, target: Target, shared: Mapping[str, int]) -> Kernel:
    text = path.read_text()
    entry, threads = _ENTRY.search(text), _THREADS.search(text)
    if entry is None or threads is None:
        raise ValueError(f"{path.name} holds no kernel of a known number of threads")
    name, size = entry[1], _product(threads.groups(default="1"))
    log = subprocess.run(
        [ptxas(), "-v", f"-arch={target.arch}", "-", "-o", "/dev/null"],
        input=_VERSION.sub(f".version {_PTX_VERSION}", text),
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    found = {what: _number(pattern, log) for what, pattern in _LIMITS.items()}
    total_shared = found["shared"] + shared.get(name, 0)
    return Kernel(
        name=name,
        threads=size,
        registers=found["registers"],
        shared=total_shared,
        stack=found["stack"],
        spills=found["spills"],
        resident=target.resident_blocks(size, found["registers"], total_shared),
        matrix=dict(Counter(f"{kind}.{shape}" for kind, shape in _MATRIX.findall(text))),
        copies=dict(Counter(_COPY.findall(text))),
    )


def _product(numbers: Iterable[str]) -> int:
    size = 1
    for number in numbers:
        size *= int(number)
    return size


def _number(pattern: re.Pattern[str], log: str) -> int:
    found = pattern.search(log)
    return int(found[1]) if found else 0
