"""The machine under a measurement: whether it was otherwise at rest, and the circumstances of a figure."""

from __future__ import annotations

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

from jaxserve.errors import JaxserveError

__all__ = ["FOREIGN_LIMIT", "CpuMeter", "circumstances", "foreign_text", "write_file", "write_report"]

FOREIGN_LIMIT = 0.05
"""Share of the machine's CPU time, used by others, above which a figure is not to be trusted."""

_PACKAGES = ("jaxserve", "jax", "jaxlib", "numpy", "transformers", "tokenizers", "torch")
_STAT = Path("/proc/stat")


class CpuMeter:
    """Share of all CPU time that other processes used while the block ran.

    Child processes that ended within the block are not others. ``foreign`` is 0..1, or None where the system does not
    tell (anywhere but on Linux).
    """

    foreign: float | None = None

    def __enter__(self) -> Self:
        self._before = self._read()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        after = self._read()
        if self._before is None or after is None:
            return
        total, busy, own = (new - old for new, old in zip(after, self._before, strict=True))
        self.foreign = min(1.0, max(0.0, (busy - own) / total)) if total > 0 else 0.0

    @staticmethod
    def _read() -> tuple[float, float, float] | None:
        """CPU seconds since boot over all cores: all, not idle, and of this process and its ended children."""
        if not _STAT.exists():
            return None
        # user nice system idle iowait irq softirq steal, then guest times, which user and nice hold already.
        ticks = [int(field) for field in _STAT.read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]]
        hertz = os.sysconf("SC_CLK_TCK")
        total = sum(ticks) / hertz
        return total, total - sum(ticks[3:5]) / hertz, sum(os.times()[:4])


def foreign_text(foreign: float | None) -> str:
    """A sentence about a ``CpuMeter``'s figure."""
    if foreign is None:
        return "How much of the machine others used cannot be measured on this system."
    warning = ": too much to trust the figures" if foreign > FOREIGN_LIMIT else ""
    return f"Other processes used {100 * foreign:.1f} % of the machine{warning}."


def circumstances() -> dict[str, Any]:
    """Command, date, machine and versions, for a report."""
    return {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "machine": {
            "cpu": _cpu_name(),
            "cores": os.cpu_count(),
            "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
            "system": f"{platform.system()} {platform.release()}",
        },
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
    }


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Write ``report`` as JSON with the circumstances, and say where. JaxserveError: it cannot be written."""
    write_file(path, json.dumps({**circumstances(), **report}, indent=1) + "\n")


def write_file(path: Path, text: str) -> None:
    """Write a file, and say where. JaxserveError: it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise JaxserveError(f"cannot write {path}: {error.strerror}.") from None
    print(f"Written to {path}")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the checkout that this package is run from, None if it is installed elsewhere."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
