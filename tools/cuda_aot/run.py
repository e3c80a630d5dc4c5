"""Starts workers and collects what they report, whatever becomes of them."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator

from cuda_aot.reports import Report
from cuda_aot.targets import Target
from cuda_aot.toolchain import environment

__all__ = ["compile_cases", "faults"]


def compile_cases(target: Target, names: Iterable[str]) -> Iterator[Report]:
    """Compile cases for a chip, and report on each as soon as it is done.

    A case that takes the worker down with it has failed; another worker goes on after it.
    """
    left = list(names)
    while left:
        with tempfile.TemporaryFile() as log:
            command = [sys.executable, "-m", "cuda_aot.worker", target.name, *left]
            with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=log, text=True) as worker:
                assert worker.stdout is not None
                for line in worker.stdout:
                    report = Report.from_json(json.loads(line))
                    left.remove(report.case)
                    yield report
            if worker.returncode == 0:
                return
            log.seek(0)
            ending = log.read().decode(errors="replace")[-2000:]
        yield Report(left.pop(0), target.name, 0.0, error=f"the compiler ended with {worker.returncode}: {ending}")


def faults(report: Report) -> list[str]:
    """What is wrong with a compiled case."""
    if report.error is not None:
        return [report.error]
    found = [f"{kernel.name} spills {kernel.spills} bytes" for kernel in report.kernels if kernel.spills]
    program, expected = report.program, report.expected
    if program is None:
        return found
    found += [f"{name} copies a pool" for name in program.pool_copies]
    if expected is not None:
        if program.alias_bytes != expected["kv_bytes"]:
            found.append(f"{program.alias_bytes} bytes are updated in place, and the pools have {expected['kv_bytes']}")
        if program.temp_bytes > expected["temp_limit"]:
            found.append(f"{program.temp_bytes} bytes of scratch, more than {expected['temp_limit']}")
        again = [name for name in program.launches if "_remat" in name]
        if again:
            found.append(f"computed twice to save memory: {', '.join(again)}")
        if program.steps != {"kCommandBuffer": 1}:
            found.append(f"not one CUDA graph: {program.steps}")
    return found
