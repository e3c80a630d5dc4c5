"""Every exception that jaxserve raises on purpose.

    JaxserveError
    ├── ConfigError            a flag or configuration value that cannot work (at start)
    ├── LoadError              a model that cannot be loaded (at start)
    │   ├── MissingFileError       a file or shard that is not there
    │   ├── CorruptFileError       a file that is truncated or not what it claims to be
    │   ├── UnsupportedModelError  an architecture, quantisation or feature that is not served
    │   └── ShapeMismatchError     configuration and tensors disagree
    ├── RequestError           a request that cannot be served as asked (HTTP 400)
    │   ├── ModelNotFoundError     the request names a model that is not served (HTTP 404)
    │   └── PromptTooLongError     its prompt leaves no room for output
    ├── QueueFullError         the server takes no more work now (HTTP 503)
    └── EngineDeadError        the engine thread has stopped (HTTP 503)

A message names the field and the limit, so that it can be shown to a user as it is.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Self

__all__ = [
    "ConfigError",
    "CorruptFileError",
    "EngineDeadError",
    "JaxserveError",
    "LoadError",
    "MissingFileError",
    "ModelNotFoundError",
    "PromptTooLongError",
    "QueueFullError",
    "RequestError",
    "ShapeMismatchError",
    "UnsupportedModelError",
    "nearest",
]


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the known one that is most like it; empty if none is."""
    match = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {match[0]!r}?" if match else ""


class JaxserveError(Exception):
    """Root of the tree."""


class ConfigError(JaxserveError, ValueError):
    """A flag or configuration value cannot work; ``setting`` is the field at fault, if the message opens with one."""

    def __init__(self, message: str, setting: str | None = None) -> None:
        super().__init__(message)
        self.setting = setting

    def as_typed(self) -> str:
        """The message for a command line, where a setting is a flag: ``--num-prompts`` for ``num_prompts``."""
        if self.setting is None:
            return str(self)
        return str(self).replace(self.setting, "--" + self.setting.replace("_", "-"), 1)


class LoadError(JaxserveError):
    """A model cannot be loaded."""


class MissingFileError(LoadError, FileNotFoundError):
    """A file or shard that the model needs is not there."""


class CorruptFileError(LoadError, ValueError):
    """A file is truncated, or is not what it claims to be."""


class UnsupportedModelError(LoadError, ValueError):
    """The architecture, quantisation or feature is not served."""


class ShapeMismatchError(LoadError, ValueError):
    """Configuration and tensors disagree."""


class RequestError(JaxserveError, ValueError):
    """A request cannot be served as asked; ``param`` names the field at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ModelNotFoundError(RequestError):
    """The request names a model that is not served."""


class PromptTooLongError(RequestError):
    """A prompt leaves no room for output in a context of ``max_model_len`` tokens; ``length`` says what it has."""

    def __init__(self, max_model_len: int, length: str) -> None:
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt {length}. Please "
            "shorten the prompt.",
            "prompt",
        )

    @classmethod
    def of_tokens(cls, max_model_len: int, num_tokens: int) -> Self:
        return cls(max_model_len, f"contains {num_tokens} input tokens, which leaves no room for output")

    @classmethod
    def of_characters(cls, max_model_len: int, num_characters: int, most: int) -> Self:
        return cls(
            max_model_len, f"has {num_characters} characters, and {most} is the most that so many tokens can hold"
        )


class QueueFullError(JaxserveError):
    """The server takes no more work now; ``retry_after`` is in how many seconds a place may be free.

    ``limit`` is the setting that says so.
    """

    def __init__(self, message: str, retry_after: float = 1.0, limit: str = "max_num_queued_reqs") -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.limit = limit


class EngineDeadError(JaxserveError):
    """The engine thread has stopped; no request can be served."""
