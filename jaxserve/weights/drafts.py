"""What all trained guessers on disk have in common: where they lie, and the tokens that they know."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxserve.errors import CorruptFileError
from jaxserve.weights.hub import ALIASES, local_path

__all__ = ["default_drafts", "read_vocabulary"]


def default_drafts(method: str, model: str) -> Path:
    """Where heads that were trained for a model lie, unless told otherwise: under ``~/.cache/jaxserve/drafts``, or
    under ``XDG_CACHE_HOME``. ``model`` is as the user names it; a path is known by where it leads to."""
    home = os.environ.get("XDG_CACHE_HOME")
    path = local_path(model)
    name = model.replace("/", "--")
    if model not in ALIASES and path.exists():
        name = f"{path.resolve().name}-{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    return (Path(home) if home else Path.home() / ".cache") / "jaxserve" / "drafts" / method / name


def read_vocabulary(config: dict[str, Any], name: str, path: Path) -> NDArray[np.int32] | None:
    """The token that each logit means, [W], from the entry ``name`` of the settings in ``path``; None without one."""
    given = config.get(name)
    if given is None:
        return None
    try:
        tokens = np.array(given, np.int32)
    except (ValueError, TypeError, OverflowError):
        tokens = np.zeros(0, np.int32)
    if tokens.ndim != 1 or not tokens.size or tokens.min() < 0:
        raise CorruptFileError(f"{path}: {name} must be a list of token ids.")
    return tokens
