"""Times candidate sizes of one launch, and says which are worth writing down."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from gpu.session import Session, short
from gpu.timing import in_threads, measure
from pallas_kernels import tuning

__all__ = ["Launch", "Tuned", "Work", "describe", "tune", "write"]

Changes = Mapping[str, int]
"""Sizes that differ from the chip's."""

_WORTH = 0.97  # of the default's time: less is within what a repetition differs by
_CLOSE = 3e-2  # results differ by rounding alone, relative to the largest


class Work(NamedTuple):
    """What is timed: ``make`` gives the function of sizes, to be jitted; it does ``calls`` calls on ``args``."""

    make: Callable[[Any], Callable[..., jax.Array]]
    args: tuple[Any, ...]
    calls: int


@dataclass(frozen=True)
class Launch:
    """A launch of an operation in a shape class.

    Attributes:
        op: folder of the operation.
        shape_class: as ``tuning.lookup`` knows it.
        sizes: makes sizes of names and numbers.
        candidates: what is tried beside the chip's sizes.
        work: makes what is timed.
    """

    op: str
    shape_class: str
    sizes: Callable[..., Any]
    candidates: Sequence[Changes]
    work: Callable[[Session], Work]

    @property
    def name(self) -> str:
        return f"{self.op}/{self.shape_class}"


@dataclass(frozen=True)
class Tuned:
    """What came out.

    Attributes:
        launch: of what.
        times: µs of each candidate that runs, by its text; the chip's own sizes first.
        reasons: why the others do not.
        best: what is to be written down; empty if the chip's sizes are as good.
    """

    launch: Launch
    times: dict[str, float] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    best: Changes = field(default_factory=dict)


def tune(launch: Launch, session: Session, chip: str) -> Tuned:
    """Compile all candidates at once, time those that compile, and compare their results with the default's.

    Raises:
        ValueError: the chip's own sizes do not run, so there is nothing to compare with.
    """
    base, work, tuned = tuning.lookup(launch.op, chip, launch.shape_class), launch.work(session), Tuned(launch)
    candidates: dict[str, Changes] = {"as it is": {}}
    for changes in launch.candidates:
        own = {name: value for name, value in changes.items() if base.get(name) != value}
        candidates.setdefault(describe(own) if own else "as it is", own)
    compiled = in_threads(
        {name: partial(_compile, launch, session, work, {**base, **own}) for name, own in candidates.items()},
        session.threads,
    )
    right: Any = None
    for name, program in compiled.items():
        if isinstance(program, Exception):
            tuned.reasons[name] = short(program)
            continue
        out = np.asarray(program(*work.args), np.float32)
        right = out if right is None and name == "as it is" else right
        if right is None:
            break
        if not np.abs(out - right).max() <= _CLOSE * np.abs(right).max():
            tuned.reasons[name] = "its result differs from that of the chip's sizes"
            continue
        tuned.times[name] = 1e6 * measure(partial(program, *work.args), calls=work.calls).seconds
    if "as it is" not in tuned.times:
        raise ValueError(f"the sizes of {chip} do not run: {tuned.reasons['as it is']}")
    best = min(tuned.times, key=lambda name: tuned.times[name])
    if tuned.times[best] <= _WORTH * tuned.times["as it is"]:
        return Tuned(launch, tuned.times, tuned.reasons, candidates[best])
    return tuned


def _compile(launch: Launch, session: Session, work: Work, sizes: dict[str, int]) -> jax.stages.Compiled:
    return session.compile(work.make(launch.sizes(**sizes)), *work.args)


def describe(changes: Changes) -> str:
    """Changes in one line."""
    return " ".join(f"{name}={value}" for name, value in changes.items())


def write(folder: Path, device_kind: str, results: Sequence[Tuned]) -> list[Path]:
    """Write ``<op>/tuned/<device>.json`` under ``folder``; classes that were not tuned now stay as they are.

    A file without entries is not written, or removed. Returns the files that are there.
    """
    written = []
    for op in dict.fromkeys(tuned.launch.op for tuned in results):
        path = tuning.path(folder, op, device_kind)
        classes = json.loads(path.read_text()) if path.exists() else {}
        for tuned in results:
            if tuned.launch.op == op:
                classes.pop(tuned.launch.shape_class, None)
                classes |= {tuned.launch.shape_class: dict(tuned.best)} if tuned.best else {}
        if not classes:
            path.unlink(missing_ok=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(classes[name])}" for name in sorted(classes))
        path.write_text(f"{{\n{lines}\n}}\n")
        written.append(path)
    return written
