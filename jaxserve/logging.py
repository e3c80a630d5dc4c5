"""One logger tree, ``jaxserve.*``, and one way to set it up."""

from __future__ import annotations

import logging
import sys

__all__ = ["get_logger", "setup"]


def get_logger(name: str) -> logging.Logger:
    """The logger of a module; ``name`` is its ``__name__``."""
    return logging.getLogger(name)


def setup(level: str = "info") -> None:
    """Write ``jaxserve`` logs to standard error, one line each. Calling it again only changes the level."""
    root = logging.getLogger("jaxserve")
    root.setLevel(level.upper())
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S"))
        root.addHandler(handler)
        root.propagate = False
