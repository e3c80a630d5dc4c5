"""One plan in the making: what is left of the token budget, and the rows so far."""

from __future__ import annotations

from jaxserve.plan import DEVICE_TOKEN, BlockCopy, PromptRead, RowPlan, StepPlan
from jaxserve.request import Request

__all__ = ["StepBuilder"]


class StepBuilder:
    """Collects rows, copies and preemptions of one step.

    Attributes:
        budget: tokens that may still be added.
        requests: the request of each row.
        copies: block copies to make first.
        preempted: ids of requests that lost their blocks.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.requests: list[Request] = []
        self.copies: list[BlockCopy] = []
        self.preempted: list[str] = []
        self._rows: list[RowPlan] = []
        self._starts: dict[str, int] = {}

    def __contains__(self, request: Request) -> bool:
        return request.id in self._starts

    def computed_before(self, request: Request) -> int:
        """Number of the request's tokens whose KV the steps before this one have certainly written.

        0 for a request that was admitted in this step: what it took over may be written by this very step.
        """
        return self._starts.get(request.id, request.computed)

    def awaits_sibling(self, request: Request) -> bool:
        """Whether a sibling is about to compute the prompt that the request can then take over."""
        sibling = request.fork_of
        if sibling is None or sibling.finish is not None or request.preemptions:
            return False
        if sibling.row < 0:  # one that has lost its blocks may take long to come back; but it alone reads the prompt
            return sibling.preemptions == 0 or sibling.reads_prompt
        return self.computed_before(sibling) < len(request.prompt)

    def add(self, request: Request, num_tokens: int, *, num_drafts: int = 0, most_right: int = 0, fresh: bool) -> None:
        """Compute the request's next ``num_tokens`` tokens and drafts that follow them in this step.

        It is advanced as if that were done, and as many drafts were right as can be, ``most_right``.
        """
        start = request.computed
        stop = start + num_tokens
        samples = stop == request.target
        tokens = request.tokens(start, stop)
        if stop > request.known:
            tokens.append(DEVICE_TOKEN)
        self._rows.append(
            RowPlan(
                request_id=request.id,
                row=request.row,
                start=start,
                num_tokens=num_tokens + num_drafts,
                tokens=tuple(tokens),
                num_drafts=num_drafts,
                samples=samples,
                fresh=fresh,
                history=tuple(request.tokens(0, request.known)) if fresh else (),
                num_prompt=len(request.prompt),
                block_ids=tuple(request.blocks),
                params=request.params,
                seed=request.seed,
                adapter_slot=request.adapter_slot,
                # Earlier answers are shared; those of an adapter are nobody else's, and of no use to others.
                private=request.cache_salt is not None or request.adapter is not None,
                read=_read(request, start, stop) if request.reads_prompt else None,
            )
        )
        self.requests.append(request)
        self._starts[request.id] = 0 if fresh else start
        self.budget -= num_tokens + num_drafts
        if start < request.owed:
            request.chunks.append(num_tokens)
        request.computed = stop + most_right
        request.pending += samples + most_right

    def build(self, *, proposes: bool) -> StepPlan:
        """The finished plan; ``proposes`` says whether the step makes drafts."""
        return StepPlan(tuple(self._rows), tuple(self.copies), tuple(self.preempted), proposes)


def _read(request: Request, start: int, stop: int) -> PromptRead | None:
    """What is wanted of the prompt's tokens among those at positions ``start`` .. ``stop - 1``."""
    num_prompt, params = len(request.prompt), request.params
    if start >= num_prompt:
        return None
    scored = params.prompt_logprobs is not None
    return PromptRead(
        num_tokens=min(stop, num_prompt) - start,
        completes=stop >= num_prompt,
        targets=tuple(request.prompt[start + 1 : stop + 1]) if scored else (),
        num_top=params.prompt_logprobs or 0,
        pooling=request.pooling,
    )
