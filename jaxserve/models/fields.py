"""Typed reads from a parsed configuration (config.json, GGUF metadata).

Such files are written by many hands. Each read says what it needs, and a complaint names the key and the kind of file,
so that a user can mend it without reading our code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.errors import CorruptFileError

__all__ = ["Fields"]

_MOST = 2**53
_MOST_LAYERS = 10_000
_LARGEST = 3.4e38  # computed with in float32


class Fields:
    """A mapping with typed reads.

    Args:
        values: the parsed configuration.
        where: what to call it in messages, such as "config.json".
        defaults: values of keys that are not there (a key that is there with null stays null).
        prefix: put before every key (GGUF keys begin with the architecture).
    """

    def __init__(
        self, values: Mapping[str, Any], where: str, defaults: Mapping[str, Any] | None = None, prefix: str = ""
    ) -> None:
        self.where = where
        self._values = values
        self._defaults = defaults or {}
        self._prefix = prefix

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it stands, or ``default``."""
        name = self._prefix + key
        return self._values[name] if name in self._values else self._defaults.get(key, default)

    def integer(self, key: str, default: int | None = None, least: int = 1, most: int = _MOST) -> int:
        """An integer from ``least`` to ``most``; without a default the key must be there. Raises CorruptFileError."""
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(key, f"an integer of at least {least}", value)
        if value > most:
            raise self.wrong(key, f"an integer of at most {most}", value)
        return value

    def num_layers(self, key: str) -> int:
        """A number of layers. Raises CorruptFileError: it is none, or one for which not even a list has room."""
        return self.integer(key, most=_MOST_LAYERS)

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number of float32; without a default the key must be there. Raises CorruptFileError."""
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _LARGEST:
            raise self.wrong(key, "a positive number", value)
        return float(value)

    def flag(self, key: str) -> bool:
        """A boolean, False where it is missing. Raises CorruptFileError."""
        value = self._present(key, False)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false", value)
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id or a list of them; empty where it is missing. Raises CorruptFileError."""
        value = self._present(key, [])
        ids = tuple(value) if isinstance(value, list) else (value,)
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            raise self.wrong(key, "a token id or a list of token ids", value)
        return ids

    def wrong(self, key: str, wanted: str, value: Any) -> CorruptFileError:
        """The error for a value that is not what ``key`` needs."""
        return CorruptFileError(f"{self.where}: {self._prefix}{key} must be {wanted}, got {value!r}.")

    def _present(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise CorruptFileError(f"{self.where} has no {self._prefix}{key}, which the model needs.")
        return value
