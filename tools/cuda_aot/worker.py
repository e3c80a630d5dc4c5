"""Compiles cases for one chip: ``python -m cuda_aot.worker sm_90 NAME…``.

Runs in a process of its own, since the compiler may abort it. Every report is a line of JSON on standard output,
written before the next case begins.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cuda_aot import toolchain
from cuda_aot.case import Case
from cuda_aot.cases import CASES
from cuda_aot.program import launch_shared, read_program
from cuda_aot.reports import Report
from cuda_aot.resources import read_kernels
from cuda_aot.targets import TARGETS, Target
from pallas_kernels import tuning

__all__ = ["main"]

_KERNEL_NAME = re.compile(r'\bname = "(\w+)"')  # of a Triton kernel, in the custom call that carries it
_ENTRY = re.compile(r"\.entry\s+(\w+)")


def main() -> None:
    """Compile the cases named on the command line."""
    target, reports = TARGETS[sys.argv[1]], os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the compiler prints is no report
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target.proto(toolchain.CUDA), topology="1x1x1"
    )
    mesh = Mesh(np.array(topology.devices), ("x",))
    for name in sys.argv[2:]:
        case = CASES[name](target)
        if case is None:
            raise ValueError(f"{name} does not exist on {target.name}")
        print(json.dumps(_report(name, case, target, mesh).to_json()), file=reports, flush=True)


def _report(name: str, case: Case, target: Target, mesh: Mesh) -> Report:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, _compiling_for(target, mesh):
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder
        try:
            lowered = _lower(case, mesh)
            compiled = lowered.compile(
                compiler_options={
                    "xla_gpu_cuda_data_dir": str(toolchain.NVCC),
                    "xla_dump_to": folder,
                    "xla_dump_emitter_re": "ptx",
                }
            )
        except Exception as error:  # of another type in every version
            message = f"{type(error).__name__}: {error}"[:2000]
            return Report(name, target.name, time.perf_counter() - began, error=message)
        seconds = time.perf_counter() - began
        kernels = read_kernels(_ptx_of_kernels(Path(folder), lowered), target, launch_shared(Path(folder)))
        program = read_program(compiled, Path(folder), case.pool)
    return Report(name, target.name, seconds, kernels=kernels, program=program, expected=case.expected)


def _lower(case: Case, mesh: Mesh) -> jax.stages.Lowered:
    whole = NamedSharding(mesh, PartitionSpec())
    args = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), case.args)
    return jax.jit(case.function, donate_argnums=case.donate).lower(*args)


@contextlib.contextmanager
def _compiling_for(target: Target, mesh: Mesh) -> Iterator[None]:
    """Tell kernels which chip they are lowered for."""
    if jax.__version_info__ >= (0, 11):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            yield
        return
    # Before 0.11 an abstract mesh has no device, and kernels would see the CPU of this process.
    seen, tuning.target = tuning.target, lambda: tuning.Target(target.device, target.capability)
    try:
        yield
    finally:
        tuning.target = seen


def _ptx_of_kernels(dump: Path, lowered: Any) -> list[Path]:
    """Files of our own kernels: of those that XLA compiled, by name; Mosaic's stand apart."""
    names = tuple(_KERNEL_NAME.findall(lowered.as_text()))
    found = []
    for path in sorted(dump.glob("*.ptx")):
        entry = _ENTRY.search(path.read_text())
        if entry is not None and (not path.name.startswith("module_") or entry[1].startswith(names or "\0")):
            found.append(path)
    return found


if __name__ == "__main__":
    main()
