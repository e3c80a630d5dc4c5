"""What ``jaxserve plan`` can be asked, beside the flags of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxserve.errors import ConfigError
from jaxserve.settings import check_integer, flag

__all__ = ["PlanOptions"]

_MOST_CONTEXTS = 64


@dataclass(frozen=True)
class PlanOptions:
    """For which device, and for what load."""

    title: ClassVar[str] = "plan"
    gpu: str = flag(
        "cpu",
        "The device: h100, h200, a100 or l4, with the memory of its data sheet; cpu, which is this machine; or an "
        "accelerator's memory in bytes, as 48G.",
    )
    sessions: int | None = flag(
        None,
        "Sessions that are to be kept at once; by default as many as fit. If they do not, the exit code is 1.",
        human=True,
    )
    context: tuple[int, ...] = flag(
        (),
        "Tokens of a session, prompt and output together; several are a mix with equally many of each. By default "
        "1024, 8192 and the longest.",
        human=True,
    )
    json: bool = flag(False, "Print all figures as JSON; bytes, tokens, seconds.")

    def __post_init__(self) -> None:
        check_integer(self, "sessions", 1, 2**31)
        if len(self.context) > _MOST_CONTEXTS:
            raise ConfigError(f"context must be at most {_MOST_CONTEXTS} numbers, got {len(self.context)}.", "context")
        for tokens in self.context:
            if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
                raise ConfigError(f"context must be integers of at least 1, got {tokens!r}.", "context")
