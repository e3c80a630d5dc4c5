"""Tile sizes are data: one JSON file per operation and kind of device, ``<op>/tuned/<device>.json``.

A file maps shape classes to sizes. A class is a path from the general to the special ("decode/b2/d128"), and what the
special says goes over what the general says, so that a file need only tell what differs. Files exist for kinds of chips
("sm_90") and, where somebody has tuned there, for devices ("nvidia_h200").
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import jax

from pallas_kernels import triton_lowering

__all__ = ["Target", "lookup", "path", "sizes", "target"]


def lookup(op: str, device_kind: str, shape_class: str) -> dict[str, int]:
    """Sizes of ``op`` on a device of this kind, for this shape class; empty where there is nothing to say.

    Args:
        op: name of the operation's folder.
        device_kind: as in ``jax.Device.device_kind``, in any spelling ("NVIDIA H200" is nvidia_h200).
        shape_class: names from the general to the special, with "/" between them.
    """
    classes = _read(path(Path(__file__).parent, op, device_kind))
    names = shape_class.split("/")
    found: dict[str, int] = {}
    for depth in range(1, len(names) + 1):
        found |= classes.get("/".join(names[:depth]), {})
    return found


def sizes(op: str, shape_class: str) -> dict[str, int]:
    """Sizes for the GPU in use, or for Hopper where there is none: those of its kind of chip, then its own."""
    gpu = target() or Target("", 90)
    return lookup(op, gpu.chip, shape_class) | lookup(op, gpu.kind, shape_class)


def path(folder: Path, op: str, device_kind: str) -> Path:
    """The file of an operation and a kind of device, where ``folder`` holds the operations."""
    return folder / op / "tuned" / f"{re.sub(r'[^a-z0-9]+', '_', device_kind.lower())}.json"


@cache
def _read(file: Path) -> dict[str, dict[str, int]]:
    return json.loads(file.read_text()) if file.exists() else {}


class Target(NamedTuple):
    """The NVIDIA GPU that programs are compiled for."""

    kind: str
    """As in ``jax.Device.device_kind``."""
    capability: int
    """Compute capability, 90 for 9.0."""

    @property
    def chip(self) -> str:
        """Kind of chip, as files of sizes know it: the newest of them that is no newer than this one."""
        return next((f"sm_{known}" for known in (90, 89) if self.capability >= known), "sm_80")


def target() -> Target | None:
    """The GPU in use; None if there is none.

    That is the device of the abstract mesh in use, by which one compiles for a device that is not there, or else the
    default device.
    """
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None and abstract.platform in ("gpu", "cuda") and triton_lowering.missing() is None:
        ask = getattr(triton_lowering.triton(), "get_gpu_info", None)
        if ask is not None:  # jax 0.10 cannot ask for the capability of a device that is not there
            return Target(abstract.device_kind, ask().compute_capability)
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", None)
    if device.platform != "gpu" or not isinstance(capability, str) or "." not in capability:  # AMD's are names
        return None
    return Target(device.device_kind, int(capability.replace(".", "")))
