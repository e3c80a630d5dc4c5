"""What the bodies of all APIs are made of."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

__all__ = ["Strict", "as_parts", "one_or_many"]


class Strict(BaseModel):
    """A part of a body that has these fields and no others, of these types and no similar ones."""

    model_config = ConfigDict(extra="forbid", strict=True)


def as_parts(value: Any) -> Any:
    """A message's content that may be a text, as a list of parts."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def one_or_many(value: Any) -> Any:
    """A list of texts that may be a text."""
    return [value] if isinstance(value, str) else value
