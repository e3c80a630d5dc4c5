"""How many drafts of each request a step verifies.

The scheduler asks once per step, with the requests that could have some. A draft that is verified costs a token of the
step; what it brings depends on how often drafts are right. Off is a policy that never wants any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from jaxserve.outputs import SpeculationStats
from jaxserve.plan import Drafts
from jaxserve.request import Request

__all__ = ["FixedSpeculation", "NoSpeculation", "Speculation"]


class Speculation(Protocol):
    """A policy of speculation.

    Attributes:
        stats: what became of the drafts so far.
        max_depth: most drafts of a request and step that can be right at once: in a tree, most on a path.
        lookahead: places in KV memory beyond its tokens that a request has use for while drafts are made.
        proposes: whether the step that is being planned makes drafts for the next one.
    """

    stats: SpeculationStats
    max_depth: int
    lookahead: int

    @property
    def proposes(self) -> bool: ...

    def choose(self, requests: Sequence[Request], num_others: int) -> Mapping[str, int]:
        """Number of drafts to verify, by request id; what is left out has none.

        Each of ``requests`` computes one token in the step that is being planned. Its newest drafts are known
        (``request.drafts``) unless tokens of it are pending: then they are in the making. ``num_others`` more requests
        compute a token and have no drafts.
        """

    def note(self, request: Request, num_drafts: int, tokens: tuple[int, ...], proposed: Drafts) -> None:
        """A step has verified ``num_drafts`` drafts of ``request``: it gave ``tokens``, the last of which is no draft.

        ``proposed`` are the drafts that follow these.
        """

    def note_step(self, num_tokens: int, seconds: float, *, proposes: bool) -> None:
        """A step without prompt chunks, of ``num_tokens`` padded tokens, took so long, making drafts or not."""

    def forget(self, request: Request) -> None:
        """The request has ended."""


class NoSpeculation:
    """Speculation switched off: it wants no drafts."""

    def __init__(self, max_depth: int = 0, lookahead: int = 0) -> None:
        self.stats = SpeculationStats(accepted_by_position=[0] * max_depth)
        self.max_depth = max_depth
        self.lookahead = lookahead

    @property
    def proposes(self) -> bool:
        """Never."""
        return False

    def choose(self, requests: Sequence[Request], num_others: int) -> Mapping[str, int]:
        """None."""
        return {}

    def note(self, request: Request, num_drafts: int, tokens: tuple[int, ...], proposed: Drafts) -> None:
        """Count."""
        if num_drafts:
            self.stats.note(num_drafts, len(tokens) - 1)

    def note_step(self, num_tokens: int, seconds: float, *, proposes: bool) -> None:
        """Nothing to learn."""

    def forget(self, request: Request) -> None:
        """Nothing was kept."""


class FixedSpeculation(NoSpeculation):
    """Always as many drafts as were asked for.

    Args:
        num_drafts: per request and step.
        lookahead, max_depth: see ``Speculation``; without a depth, drafts are chains.
    """

    def __init__(self, num_drafts: int, lookahead: int = 0, max_depth: int | None = None) -> None:
        super().__init__(num_drafts if max_depth is None else max_depth, lookahead)
        self._num_drafts = num_drafts

    @property
    def proposes(self) -> bool:
        """Always."""
        return True

    def choose(self, requests: Sequence[Request], num_others: int) -> Mapping[str, int]:
        """As many for each, where so many are there."""
        return {
            request.id: self._num_drafts if request.pending else min(self._num_drafts, len(request.drafts.tokens))
            for request in requests
        }
