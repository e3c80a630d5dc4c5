"""``jaxserve collect-env``: what a report of a problem should say about the machine."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any

from jaxserve.bench.machine import circumstances

__all__ = ["add_parser", "run"]

_DEVICES = """
import json, jax
from pallas_kernels.native import missing
print(json.dumps({
    "devices": [f"{d.platform}: {d.device_kind}" for d in jax.devices()],
    "native_kernels": missing() or "there",
}))
"""
_DEVICE_SECONDS = 120
_VARIABLES = ("CUDA_", "HF_", "JAX_", "JAXSERVE_", "LD_LIBRARY_PATH", "NVIDIA_", "OMP_", "TF_", "XLA_")
_SECRET = ("KEY", "PASSWORD", "SECRET", "TOKEN")


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser("collect-env", help="describe this machine, for reports", description=__doc__)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Print it as JSON. Secrets in the environment are not shown."""
    found = circumstances()
    del found["command"]
    print(json.dumps({**found, "jax": _jax(), "environment": _environment()}, indent=2))
    return 0


def _jax() -> dict[str, Any]:
    """What jax sees, in a process of its own: a broken driver may end or block whoever asks."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _DEVICES], capture_output=True, text=True, timeout=_DEVICE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"jax did not find its devices within {_DEVICE_SECONDS} s"}
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"error": f"jax has failed (code {done.returncode}): {last}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _environment() -> dict[str, str]:
    shown = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)}
    return {name: "***" if any(word in name for word in _SECRET) else value for name, value in shown.items()}
