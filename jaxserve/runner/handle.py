"""What a dispatched step will have sampled: device arrays on their way to the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np

from jaxserve.plan import NO_DRAFTS, Drafts, RowPlan, StepPlan, StepResult, TokenLogprobs
from jaxserve.runner.reader import PromptParts
from jaxserve.sampling import Sampled
from jaxserve.speculative import NO_DRAFT, Proposal

__all__ = ["StepHandle"]


class StepHandle:
    """The pending result of one step.

    Args:
        plan: the step's plan.
        padded_tokens: size of the bucket that it ran in.
        order: its sampling rows, in the order of their places.
        sampled: per place, on the device; None if no row samples.
        reached: [P] bool on the device, which places follow right drafts only.
        drafts: on the device, what was proposed to follow the rows of ``order``; None if nothing was.
        parts: what was read of prompts, None for nothing.
    """

    def __init__(
        self,
        plan: StepPlan,
        padded_tokens: int,
        order: Sequence[RowPlan],
        sampled: Sampled | None = None,
        reached: jax.Array | None = None,
        drafts: Proposal | None = None,
        parts: PromptParts | None = None,
    ) -> None:
        self.plan = plan
        self.padded_tokens = padded_tokens
        self._order = order
        self._sampled = sampled
        self._reached = reached
        self._drafts = drafts
        self._parts = parts
        for array in jax.tree.leaves((reached, drafts, None if sampled is None else sampled.tokens)):
            array.copy_to_host_async()

    def result(self) -> StepResult:
        """Wait for the device and return what was sampled."""
        read = {} if self._parts is None else self._parts.result()
        parts = tuple(read.get(row.request_id) for row in self.plan.rows)
        if self._sampled is None:
            return StepResult(tuple(() for _ in self.plan.rows), tuple(None for _ in self.plan.rows), parts=parts)
        tokens, reached = np.asarray(self._sampled.tokens).tolist(), np.asarray(self._reached).tolist()
        proposed = None if self._drafts is None else _drafts(self._drafts)
        wanted = any(row.params.logprobs is not None for row in self._order)
        logprobs = _logprobs(self._sampled) if wanted else None
        found: dict[str, tuple[tuple[int, ...], tuple[TokenLogprobs, ...] | None, Drafts]] = {}
        first = 0
        for i, row in enumerate(self._order):
            kept = [place for place in range(first, first + 1 + row.num_drafts) if reached[place]]
            first += 1 + row.num_drafts
            wants = None if logprobs is None else row.params.logprobs
            found[row.request_id] = (
                tuple(tokens[place] for place in kept),
                None if wants is None else tuple(logprobs(place, wants) for place in kept),  # type: ignore[misc]
                NO_DRAFTS if proposed is None else proposed[i],
            )
        rows = [found.get(row.request_id, ((), None, NO_DRAFTS)) for row in self.plan.rows]
        sampled, measured, followed = zip(*rows, strict=True)
        return StepResult(sampled, measured, followed, parts)


def _logprobs(sampled: Sampled) -> Callable[[int, int], TokenLogprobs]:
    """What gives the log probabilities at a place, with as many of the likeliest tokens as asked."""
    chosen, ranks, ids, best = (
        np.asarray(x).tolist() for x in (sampled.logprobs, sampled.ranks, sampled.top_ids, sampled.top_logprobs)
    )

    def at(place: int, count: int) -> TokenLogprobs:
        top = tuple(zip(ids[place][:count], best[place][:count], strict=True))
        return TokenLogprobs(chosen[place], ranks[place], top)

    return at


def _drafts(proposal: Proposal) -> list[Drafts]:
    """The drafts of each row, up to its last."""
    tokens = np.asarray(proposal.tokens)
    chain = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    parents = chain if proposal.parents is None else np.asarray(proposal.parents)
    counts = (tokens != NO_DRAFT).cumprod(1).sum(1).tolist()
    rows = zip(tokens.tolist(), parents.tolist(), counts, strict=True)
    return [Drafts(tuple(ids[:count]), tuple(nodes[:count])) for ids, nodes, count in rows]
