"""What the benchmarks share: the circumstances of a figure, whether the machine was otherwise at rest, settings."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import yaml

__all__ = ["FOREIGN_LIMIT", "CpuMeter", "circumstances", "setting", "write_report"]

FOREIGN_LIMIT = 0.05
"""Share of the machine's CPU time, used by others, above which a figure is not to be trusted."""

PACKAGES = ("jaxserve", "jax", "jaxlib", "numpy", "transformers", "tokenizers", "torch")


class CpuMeter:
    """Share of all CPU time that other processes used while the block ran: ``foreign``, 0..1."""

    foreign: float = 0.0

    def __enter__(self) -> Self:
        self._before = self._read()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        total, busy, own = (new - old for new, old in zip(self._read(), self._before, strict=True))
        self.foreign = max(0.0, (busy - own) / total) if total > 0 else 0.0

    @staticmethod
    def _read() -> tuple[float, float, float]:
        """CPU seconds since boot over all cores: all, not idle, and of this process and its children."""
        times = psutil.cpu_times()
        # Linux counts guest time in user time as well; leave it out once.
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        busy = total - times.idle - getattr(times, "iowait", 0.0)
        process = psutil.Process()
        own = sum(process.cpu_times()[:4])  # user, system, and the same of children that have ended
        for child in process.children(recursive=True):
            try:
                own += sum(child.cpu_times()[:4])
            except psutil.NoSuchProcess:
                continue
        return total, busy, own


def circumstances() -> dict[str, Any]:
    """Command, date, machine and versions, for a report."""
    return {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "machine": {
            "cpu": _cpu_name(),
            "cores": os.cpu_count(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "system": f"{platform.system()} {platform.release()}",
        },
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
    }


def setting(text: str) -> tuple[str, Any]:
    """A ``name=value`` of the command line, the value as in YAML."""
    name, found, value = text.partition("=")
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form name=value")
    return name, yaml.safe_load(value)


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Write ``report`` as JSON, and say where."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"\nWritten to {path}")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
