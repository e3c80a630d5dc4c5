"""Pallas' lowering through Triton, imported when it is needed: jax has deprecated it since 0.11, and will remove it."""

from __future__ import annotations

import importlib
from types import ModuleType

import jax

__all__ = ["missing", "triton"]


def triton() -> ModuleType:
    """The module with its loads, stores and compiler parameters; raises ImportError where it is gone."""
    return importlib.import_module("jax.experimental.pallas.triton")


def missing() -> str | None:
    """Why this jax cannot lower kernels through Triton; None if it can."""
    try:
        triton()
    except ImportError as error:
        return f"Triton's lowering of jax {jax.__version__} cannot be imported: {error}"
    return None
