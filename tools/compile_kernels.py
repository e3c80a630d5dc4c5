#!/usr/bin/env python3
"""Compile all Pallas kernels, and whole steps, to machine code for NVIDIA GPUs; no GPU is needed.

    python tools/compile_kernels.py --install                # once: the compiler's wheels, in a folder of their own
    python tools/compile_kernels.py                          # everything
    python tools/compile_kernels.py --target sm_90 --only decode --markdown

Shows what each kernel takes of a multiprocessor, and of each program what it keeps in memory and launches. Fails if
anything does not compile, spills registers, copies a KV pool, or is not one CUDA graph where it should be.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from cuda_aot import toolchain
from cuda_aot.cases import names_for
from cuda_aot.reports import Kernel, Program, Report
from cuda_aot.run import compile_cases, faults
from cuda_aot.targets import TARGETS
from rich.console import Console
from rich.table import Table

__all__ = ["main"]

_KERNEL_COLUMNS = (
    *("case", "target", "kernel", "threads", "registers", "shared KiB", "spills", "stack", "blocks/SM"),
    *("matrix", "copies", "seconds"),
)
_STEP_COLUMNS = ("case", "target", "launches", "per layer", "in place MiB", "scratch MiB", "host starts", "seconds")
_OPERATION_COLUMNS = ("case", "target", "launches", "in place MiB", "scratch MiB", "kernels", "seconds")


def counts(instructions: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in instructions.items()) or "–"


def kernel_row(report: Report, kernel: Kernel) -> tuple[str, ...]:
    used = (
        kernel.threads,
        kernel.registers,
        f"{kernel.shared / 1024:.1f}",
        kernel.spills,
        kernel.stack,
        kernel.resident,
    )
    names = (report.case, report.target, kernel.name)
    return (*names, *map(str, used), counts(kernel.matrix), counts(kernel.copies), f"{report.seconds:.1f}")


def step_row(report: Report, program: Program, layers: int) -> tuple[str, ...]:
    launches = sum(program.launches.values())
    graph = "one CUDA graph" if program.steps == {"kCommandBuffer": 1} else counts(program.steps)
    return (
        *(report.case, report.target, str(launches), f"{launches / layers:.1f}"),
        *memory(program),
        *(graph, f"{report.seconds:.1f}"),
    )


def operation_row(report: Report, program: Program) -> tuple[str, ...]:
    launches = sum(program.launches.values())
    return (
        *(report.case, report.target, str(launches)),
        *memory(program),
        *(counts(program.launches), f"{report.seconds:.1f}"),
    )


def memory(program: Program) -> tuple[str, str]:
    return f"{program.alias_bytes / 2**20:.0f}", f"{program.temp_bytes / 2**20:.1f}"


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], markdown: bool) -> None:
    if markdown:
        lines = [columns, ["---"] * len(columns), *rows]
        print(f"\n{title}\n", *(f"| {' | '.join(line)} |" for line in lines), sep="\n")
        return
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def show_all(reports: Sequence[Report], markdown: bool) -> None:
    steps, operations = [], []
    for report in reports:
        if report.program and report.expected:
            steps.append(step_row(report, report.program, report.expected["layers"]))
        elif report.program and not report.kernels:
            operations.append(operation_row(report, report.program))
    kernels = [kernel_row(report, kernel) for report in reports if not report.expected for kernel in report.kernels]
    for title, columns, rows in (
        ("Kernels", _KERNEL_COLUMNS, kernels),
        ("Steps", _STEP_COLUMNS, steps),
        ("Operations that XLA keeps", _OPERATION_COLUMNS, operations),
    ):
        if rows:
            show(title, columns, rows, markdown)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", action="store_true", help="download the compiler's wheels, and stop")
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="chips; by default all")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name holds this")
    parser.add_argument("--markdown", action="store_true", help="print tables for a document")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all reports to a file")
    args = parser.parse_args()
    if args.install:
        try:
            toolchain.install()
        except subprocess.CalledProcessError as error:
            return int(error.returncode)  # pip has said why
        return 0
    reason = toolchain.missing()
    if reason is not None:
        parser.error(reason)
    reports: list[Report] = []
    for target in (TARGETS[name] for name in args.target or TARGETS):
        for report in compile_cases(target, [name for name in names_for(target) if args.only in name]):
            reports.append(report)
            wrong = faults(report)
            print(f"{report.target}  {report.case}: {'; '.join(wrong) or 'ok'}", file=sys.stderr, flush=True)
    show_all(reports, args.markdown)
    if args.json:
        args.json.write_text(json.dumps([report.to_json() for report in reports], indent=1))
    failed = [report for report in reports if faults(report)]
    print(f"{len(reports) - len(failed)} of {len(reports)} ok", file=sys.stderr)
    return 1 if failed or not reports else 0


if __name__ == "__main__":
    sys.exit(main())
