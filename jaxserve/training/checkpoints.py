"""The state of a training on disk, so that it goes on where it was stopped.

One orbax checkpoint, named by its step. It is written under another name and renamed when complete; then older ones go.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

__all__ = ["restore", "save"]

_UNFINISHED = "unfinished"
State = TypeVar("State")


def save(folder: Path, step: int, state: Any) -> None:
    """Write the state after ``step`` steps."""
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / _UNFINISHED
    shutil.rmtree(unfinished, ignore_errors=True)
    with _checkpointer() as checkpointer:
        checkpointer.save(unfinished.resolve(), _by_number(jax.device_get(state)))
    target = folder / f"{step:08d}"
    shutil.rmtree(target, ignore_errors=True)
    unfinished.rename(target)
    for old in _steps(folder)[:-1]:
        shutil.rmtree(old)


def restore(folder: Path, start: State) -> tuple[int, State]:
    """The newest state, in the form of ``start``, and its step; ``start`` itself after 0 steps if there is none."""
    steps = _steps(folder)
    if not steps:
        return 0, start
    import orbax.checkpoint as ocp

    numbered = _by_number(start)
    as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in numbered}
    with _checkpointer() as checkpointer:
        found = checkpointer.restore(steps[-1].resolve(), restore_args=as_numpy)
    leaves = [jax.device_put(found[name]) for name in numbered]
    return int(steps[-1].name), jax.tree.unflatten(jax.tree.structure(start), leaves)


def _by_number(state: Any) -> dict[str, Any]:
    """The leaves of a tree; its form is that of the program that reads it."""
    return {f"{i:04d}": leaf for i, leaf in enumerate(jax.tree.leaves(state))}


def _steps(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("[0-9]*") if path.is_dir())


def _checkpointer() -> Any:
    # Imported here: it takes a second, and only some of a training's parts need it.
    import orbax.checkpoint as ocp

    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True))
