"""What may come next: the one interface of everything that forbids tokens.

A constraint is host state of one request. Before a step samples, its ``mask`` says which tokens are legal; after the
step is read, ``advance`` moves it past the accepted tokens. ``rollback`` undoes tokens (rejected drafts).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Constraint"]


class Constraint(Protocol):
    """Which tokens are legal at the next position of one request.

    Attributes:
        error: why it cannot say so any more, None while it can. The request has failed then.
    """

    @property
    def error(self) -> str | None: ...

    def mask(self, bits: NDArray[np.uint32]) -> None:
        """Clear the bits of illegal tokens in ``bits`` [ceil(V / 32)]; token t is bit t % 32 of word t // 32."""

    def advance(self, tokens: tuple[int, ...]) -> None:
        """Move past accepted output tokens."""

    def rollback(self, num_tokens: int) -> None:
        """Undo the last ``num_tokens`` tokens of ``advance``."""
