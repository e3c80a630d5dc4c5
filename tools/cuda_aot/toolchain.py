"""Where the compiler is: three wheels in a folder of their own, which only workers see.

jax's CUDA plug-in makes PTX, the assembler of NVIDIA's own wheel makes machine code of it. They need no driver, no
toolkit and no GPU. In the project's own environment the plug-in would be found by every start of jax, and complain that
there is no GPU; hence the folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

__all__ = ["CUDA", "NVCC", "environment", "install", "missing", "ptxas"]

CUDA = "12.9.86"
"""Version of the assembler, and so of the CUDA that is compiled for: figures are the same on every machine."""

_ROOT = Path(__file__).parents[2]
_FOLDER = Path(sys.prefix) / "cuda-aot"
NVCC = _FOLDER / "nvidia" / "cuda_nvcc"
"""The folder that XLA takes for a CUDA toolkit."""


def _wheels() -> dict[str, str]:
    jaxlib = version("jaxlib")  # a plug-in serves the jaxlib of its own version
    return {"jax-cuda12-pjrt": jaxlib, "jax-cuda12-plugin": jaxlib, "nvidia-cuda-nvcc-cu12": CUDA}


def missing() -> str | None:
    """Why nothing can be compiled here; None if it can."""
    for name, wanted in _wheels().items():
        if not (_FOLDER / f"{name.replace('-', '_')}-{wanted}.dist-info").is_dir():
            return f"{name} {wanted} is not in {_FOLDER}; `python tools/compile_kernels.py --install` puts it there"
    return None


def install() -> None:
    """Download the wheels (240 MB) and unpack them; does nothing if they are there.

    Raises:
        subprocess.CalledProcessError: pip could not get them.
    """
    if missing() is None:
        return
    partial = _FOLDER.with_name(f"{_FOLDER.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    pinned = [f"{name}=={wanted}" for name, wanted in _wheels().items()]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(partial)]
    try:
        subprocess.run([*pip, *pinned], check=True)
        shutil.rmtree(_FOLDER, ignore_errors=True)
        partial.rename(_FOLDER)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def ptxas() -> str:
    """Path of the assembler."""
    return str(NVCC / "bin" / "ptxas")


def environment() -> dict[str, str]:
    """Environment variables of a worker."""
    path = os.pathsep.join(map(str, (_FOLDER, _ROOT / "tools", _ROOT)))
    own = {
        "PYTHONPATH": path,
        "JAX_PLATFORMS": "cpu",  # the plug-in is asked for its compiler, never for a device
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_ROOT": str(NVCC),  # where Mosaic looks for the assembler
    }
    return {**os.environ, **own}
