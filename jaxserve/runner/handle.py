"""What a dispatched step will have sampled: device arrays on their way to the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxserve.plan import RowPlan, StepPlan, StepResult, TokenLogprobs
from jaxserve.sampling import Sampled

__all__ = ["StepHandle"]


class StepHandle:
    """The pending result of one step.

    Args:
        plan: the step's plan.
        order: its sampling rows, in the order of ``sampled``.
        sampled: device arrays, None if no row samples.
    """

    def __init__(self, plan: StepPlan, order: Sequence[RowPlan], sampled: Sampled | None) -> None:
        self.plan = plan
        self._index = {row.request_id: i for i, row in enumerate(order)}
        self._sampled = sampled
        self._wants_logprobs = any(row.params.logprobs is not None for row in order)
        if sampled is not None:
            sampled.tokens.copy_to_host_async()

    def result(self) -> StepResult:
        """Wait for the device and return what was sampled."""
        if self._sampled is None:
            return StepResult(tuple(() for _ in self.plan.rows), tuple(None for _ in self.plan.rows))
        sampled = self._sampled
        tokens = np.asarray(sampled.tokens).tolist()
        top = None
        if self._wants_logprobs:
            top = [
                np.asarray(x).tolist() for x in (sampled.logprobs, sampled.ranks, sampled.top_ids, sampled.top_logprobs)
            ]
        out_tokens: list[tuple[int, ...]] = []
        out_logprobs: list[tuple[TokenLogprobs, ...] | None] = []
        for row in self.plan.rows:
            i = self._index.get(row.request_id)
            out_tokens.append(() if i is None else (tokens[i],))
            if i is None or top is None or row.params.logprobs is None:
                out_logprobs.append(None)
                continue
            count = row.params.logprobs
            best = tuple(zip(top[2][i][:count], top[3][i][:count], strict=True))
            out_logprobs.append((TokenLogprobs(top[0][i], top[1][i], best),))
        return StepResult(tuple(out_tokens), tuple(out_logprobs))
