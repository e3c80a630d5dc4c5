"""Finding the library, and telling XLA of what is in it."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path

import jax

__all__ = ["load", "missing", "use_kernels"]

_HANDLERS = (
    "jaxserve_kv_write",
    "jaxserve_lora",
    "jaxserve_matmul",
    "jaxserve_paged_attention",
    "jaxserve_rms_norm",
)


@cache
def missing() -> str | None:
    """Why the kernels cannot be used here; None if they can. The first call loads them."""
    path = _find()
    if path is None:
        return "the native CPU kernels were not built: no C++ compiler was found when jaxserve was installed"
    try:
        library = _open(path)
        library.jaxserve_use_kernels(b"auto")
        for name in _HANDLERS:
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    # What the loader and XLA raise for a library of another platform or version is not declared.
    except Exception as error:
        return f"the native CPU kernels in {path} cannot be loaded: {error}"
    return None


def load() -> None:
    """Load and register the kernels. Raises RuntimeError with the reason if they cannot be used."""
    reason = missing()
    if reason is not None:
        raise RuntimeError(reason)


def use_kernels(isa: str) -> str:
    """Use the kernels of an instruction set and return its name.

    Args:
        isa: "avx512", "avx2", "neon" or "generic"; "auto" for the best that this CPU runs.

    Raises:
        ValueError: this CPU does not run them.
    """
    load()
    path = _find()
    assert path is not None
    name: bytes | None = _open(path).jaxserve_use_kernels(isa.encode())
    if name is None:
        raise ValueError(f"this CPU does not run kernels for {isa!r}")
    return name.decode()


def _find() -> Path | None:
    # An editable install keeps what is built in another folder than the sources; the package's path names both.
    paths = (Path(folder) / "_native.so" for folder in sys.modules[__package__].__path__)
    return next((path for path in paths if path.is_file()), None)


def _open(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.jaxserve_use_kernels.restype = ctypes.c_char_p
    return library
