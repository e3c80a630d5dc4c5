"""What a field of a configuration is made of, and the checks that several configurations need."""

from __future__ import annotations

import math
from dataclasses import field, fields
from typing import Any

from jaxserve.errors import ConfigError

__all__ = ["check_choices", "check_integer", "check_seconds", "flag"]


def flag(default: Any, help: str, **metadata: Any) -> Any:
    """A field of a dataclass of settings: its default, its help text, and what the command line needs besides."""
    return field(default=default, metadata={"help": help, **metadata})


def check_choices(part: Any) -> None:
    """Raise ConfigError where a field of ``part`` is not among its choices."""
    for f in fields(part):
        choices = f.metadata.get("choices")
        value = getattr(part, f.name)
        if choices and value not in choices:
            raise ConfigError(f"{f.name} must be one of {', '.join(map(str, choices))}, got {value!r}.", f.name)


def check_integer(part: Any, name: str, low: int, high: int | None = None) -> None:
    """Raise ConfigError unless the field is None or an integer from ``low`` to ``high``."""
    value = getattr(part, name)
    if value is None:
        return
    legal = isinstance(value, int) and not isinstance(value, bool)
    if not legal or value < low or (high is not None and value > high):
        limits = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise ConfigError(f"{name} must be an integer {limits}, got {value!r}.", name)


def check_seconds(part: Any, name: str, *, positive: bool = False) -> None:
    """Raise ConfigError unless the field is None or a finite number of seconds from 0, or above it."""
    value = getattr(part, name)
    if value is None:
        return
    legal = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not legal or value < 0 or (positive and value == 0):
        limit = "above 0" if positive else "from 0"
        raise ConfigError(f"{name} must be a number of seconds {limit}, got {value}.", name)
