"""How a flag is declared, and what is checked of all of them."""

from __future__ import annotations

from dataclasses import field, fields
from typing import Any

from jaxserve.errors import ConfigError

__all__ = ["check_choices", "check_integer", "check_texts", "flag"]


def flag(default: Any, help: str, **metadata: Any) -> Any:
    """A field with its help, and maybe ``choices``, or ``human`` where 4k is a number."""
    return field(default=default, metadata={"help": help, **metadata})


def check_choices(part: Any) -> None:
    """Raise ConfigError where a field of ``part`` is not among its choices."""
    for f in fields(part):
        choices = f.metadata.get("choices")
        value = getattr(part, f.name)
        if choices and value not in choices:
            raise ConfigError(f"{f.name} must be one of {', '.join(map(str, choices))}, got {value!r}.", f.name)


def check_integer(part: Any, name: str, low: int, high: int | None = None) -> None:
    """Raise ConfigError where a field of ``part`` is neither None nor an integer from ``low`` to ``high``."""
    value = getattr(part, name)
    if value is None:
        return
    legal = isinstance(value, int) and not isinstance(value, bool)
    if not legal or value < low or (high is not None and value > high):
        limits = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise ConfigError(f"{name} must be an integer {limits}, got {value!r}.", name)


def check_texts(part: Any) -> None:
    """Raise ConfigError where a text of ``part`` is empty, which is never a value: as a path it would be here."""
    for f in fields(part):
        if f.name != "model" and getattr(part, f.name) == "":
            raise ConfigError(f"{f.name} must not be empty.", f.name)
