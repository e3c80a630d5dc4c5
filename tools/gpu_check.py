#!/usr/bin/env python3
"""Check and time everything on one GPU, in six minutes at most.

    python tools/gpu_check.py --out gpu_check.json     # on a machine with a GPU
    python tools/gpu_check.py --dry                    # the same code without one: tiny shapes, interpreted kernels

Asks in order of value, and leaves out what the budget has no time for: what memory does at best; whether every kernel
is right; how fast attention is, against that and against attention without a kernel; how fast whole steps of a Llama 8B
with random weights are, against their roofline, and whether they leave the KV pools where they are. Prints one table,
with targets beside figures. Fails if a check finds something wrong or a section breaks off; a target that is missed is
shown, and is no failure.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpu.sections import Section

__all__ = ["main"]


def all_sections() -> list[Section]:
    """Most valuable first."""
    from gpu.bandwidth import copy_bandwidth
    from gpu.correctness import kernels_are_right
    from gpu.decode_speed import decode_main, decode_rest
    from gpu.prefill_speed import prefill_speed
    from gpu.product_speed import product_speed
    from gpu.scan_speed import scan_speed
    from gpu.sections import Section
    from gpu.step_speed import step_speed

    return [
        Section("memory", 5, copy_bandwidth),
        Section("correctness", 20, kernels_are_right),
        Section("decode attention", 15, decode_main),
        Section("steps", 60, step_speed),
        Section("prefill attention", 15, prefill_speed),
        Section("products", 20, product_speed),
        Section("scan over layers", 25, scan_speed),
        Section("more decode attention", 15, decode_rest),
    ]


def prepare(*, dry: bool) -> None:
    """Before jax is imported: the CPU if that is wanted, and the packages, which need not be installed."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    if dry:
        os.environ["JAX_PLATFORMS"] = "cpu"
    warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="no GPU: tiny shapes on the CPU")
    parser.add_argument("--budget", type=float, default=330, metavar="SECONDS", help="by default 330")
    parser.add_argument("--only", default="", metavar="TEXT", help="sections whose name holds this")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write everything as JSON, after every section")
    args = parser.parse_args()
    prepare(dry=args.dry)
    import jax
    from gpu.sections import run_sections
    from gpu.session import open_session
    from gpu.table import show

    device = jax.devices()[0]
    if device.platform != "gpu" and not args.dry:
        parser.error(f"the device is {device.device_kind}, no GPU; --dry does without")
    session = open_session(args.budget, dry=args.dry)
    about: dict[str, Any] = {
        "device": device.device_kind,
        "dry": args.dry,
        "python": sys.version.split()[0],
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy")},
    }

    def tell(line: str) -> None:
        print(f"[{session.clock.spent:6.1f} s] {line}", file=sys.stderr, flush=True)

    reports = []
    sections = [section for section in all_sections() if args.only in section.name]
    for report in run_sections(sections, session, tell):
        reports.append(report)
        if args.out:  # what is known is kept, should the machine be taken away
            found = {"seconds": session.clock.spent, "sections": [report.to_json() for report in reports]}
            args.out.write_text(json.dumps(about | found, indent=1, ensure_ascii=False))
    show(reports, f"{device.device_kind}, jax {jax.__version__}" + (", dry" if args.dry else ""))
    faults = [fault for report in reports for fault in report.faults]
    for fault in faults:
        print(f"WRONG: {fault}", file=sys.stderr)
    if not reports:
        parser.error(f"no section's name holds {args.only!r}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
