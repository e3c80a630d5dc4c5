"""The scheduler: turns requests into one plan per step, and results into tokens.

There is no prefill and no decode here. Each request has ``computed`` tokens and a ``target``; a step moves ``computed``
towards it under one token budget, for running requests first, then for waiting ones. Prompts in chunks, cached
prefixes, forks, resumed requests and plain decoding are all that one rule.

A plan may be made while one step is in flight. Its sampled tokens count as ``pending``: they exist, but only the device
knows them yet. ``update`` settles them afterwards. Drafts count as if all of them were right, or in a tree as many as a
path can have; ``update`` takes back what the rejected ones had counted for.

Why a plan always moves something on. Take the first running request by rank whose end may not be in flight already.
Nothing is scheduled before it, so everybody after it may be preempted for it but those that can finish within their own
blocks (these are scheduled after it, as the budget is untouched) and those that may end in flight (the next ``update``
ends them or shows that they have not). If there are none of either, the request gets all blocks, and ``add`` has made
sure that it fits into these; drafts never preempt. If nothing runs, the first waiting request finds all blocks free.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from jaxserve.blocks import BlockManager, Prefix
from jaxserve.config import SchedulerConfig
from jaxserve.errors import RequestError
from jaxserve.outputs import TokenEvent
from jaxserve.plan import NO_DRAFTS, StepPlan, StepResult, TokenLogprobs
from jaxserve.request import FinishReason, Request
from jaxserve.scheduler.admission import AdmissionRule, Patience, StaticBatching
from jaxserve.scheduler.ends import append_tokens, check_servable, event_of, note_read
from jaxserve.scheduler.preemption import choose_victim, may_end_in_flight
from jaxserve.scheduler.queue import RequestQueue, fcfs, priority
from jaxserve.scheduler.speculation import NoSpeculation, Speculation
from jaxserve.scheduler.step import StepBuilder

__all__ = ["Scheduler"]

_RANKS = {"fcfs": fcfs, "priority": priority}
_BATCHING: Mapping[str, Sequence[Callable[[], AdmissionRule]]] = {"continuous": (), "static": (StaticBatching,)}

_MAX_BLOCKED = 16
"""Most waiting requests of one step that are found not to fit before the search for a smaller one stops."""

_RESUME_SLACK = 2
"""Blocks that must be left for each running request when a preempted one comes back, lest it is preempted at once."""


class Scheduler:
    """Plans steps.

    Args:
        config: policy, batching, chunking.
        blocks: KV memory.
        max_num_batched_tokens: most tokens computed in one step.
        max_num_seqs: most requests that run at once; rows 0 .. max_num_seqs - 1 are theirs.
        admission: rules that a request must pass to start.
        speculation: how many drafts are verified.
        patience: how long a request that cannot start lets others overtake it.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        admission: Sequence[AdmissionRule] = (),
        speculation: Speculation | None = None,
        patience: Patience | None = None,
    ) -> None:
        self.blocks = blocks
        self._budget = max_num_batched_tokens
        self._chunked = config.enable_chunked_prefill
        self._long_threshold = config.long_prefill_token_threshold
        self._admission = (*(rule() for rule in _BATCHING[config.batching]), *admission)
        self._patience = patience or Patience()
        self.speculation = speculation or NoSpeculation()
        self._requests: dict[str, Request] = {}
        self._waiting = RequestQueue(_RANKS[config.scheduling_policy])
        self._running = RequestQueue(_RANKS[config.scheduling_policy])
        self._free_rows = list(reversed(range(max_num_seqs)))
        self._in_flight: deque[tuple[StepPlan, list[Request]]] = deque()
        self.steps_total = 0
        self.preemptions_total = 0
        self.prompt_tokens_total = 0
        self.generation_tokens_total = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._requests)

    @property
    def num_running(self) -> int:
        """Number of requests that have a row and blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait to start or to be resumed."""
        return len(self._waiting)

    @property
    def queues(self) -> tuple[RequestQueue, RequestQueue]:
        """Running and waiting requests, in the order of service."""
        return self._running, self._waiting

    def get(self, request_id: str) -> Request | None:
        """The unfinished request of this id."""
        return self._requests.get(request_id)

    def add(self, request: Request) -> None:
        """Queue a request; RequestError if it could never be served."""
        if request.id in self._requests:
            raise RequestError(f"request_id {request.id!r} is in use by a running request.", "request_id")
        check_servable(request, self.blocks, None if self._chunked else self._budget)
        self._requests[request.id] = request
        self._waiting.add(request)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> TokenEvent | None:
        """End a request now, in whatever state it is; None if there is no such unfinished request.

        A token of it that is still in flight is dropped.
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        self._finish(request, reason)
        return event_of(request)

    def abandon(self) -> None:
        """Drop all requests, and the plans that are not settled."""
        for request_id in tuple(self._requests):
            self.abort(request_id)
        self._in_flight.clear()

    def plan(self) -> StepPlan:
        """The next step. At most one earlier plan may be unsettled; an empty plan needs no ``update``."""
        if len(self._in_flight) > 1:
            raise AssertionError("a step is planned while two are in flight")
        self.blocks.begin_step()
        for rule in self._admission:
            rule.begin_step(self._running)
        step = StepBuilder(self._budget)
        self._plan_running(step)
        # Where somebody was just preempted for memory, whoever came in now would make it worse.
        if not step.preempted:
            self._plan_waiting(step)
        plan = step.build(proposes=self.speculation.proposes)
        if plan:
            self.steps_total += 1
            self._in_flight.append((plan, step.requests))
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Settle a step: append its tokens, end requests that are done, and publish blocks that are full now."""
        events = note_read(requests := self._take_in_flight(plan), result.parts)
        proposed = result.drafts or (NO_DRAFTS,) * len(plan.rows)
        rows = zip(plan.rows, requests, result.tokens, result.logprobs, proposed, strict=True)
        for row, request, tokens, logprobs, drafts in rows:
            if not row.samples:
                continue
            most_right = min(row.num_drafts, self.speculation.max_depth)
            request.pending -= 1 + most_right
            if request.finish is None:
                self.speculation.note(request, row.num_drafts, tokens, drafts)
                if request.row >= 0:  # one that was preempted meanwhile has computed nothing
                    request.computed -= most_right - (len(tokens) - 1)
                    request.drafts = drafts
                events.append(self._settle(request, row.num_drafts, tokens, logprobs))
        return events

    # --- planning

    def _plan_running(self, step: StepBuilder) -> None:
        running = tuple(self._running)
        limit = self._chunk_limit()
        wanted = self._want_drafts(running)
        for index, request in enumerate(running):
            if step.budget == 0:
                break
            if request.row < 0 or may_end_in_flight(request):  # it has just been preempted, or needs nothing more
                continue
            # A long prompt leaves one token to each request behind it: prefill does not stall decoding.
            share = max(1, step.budget - (len(running) - 1 - index))
            num_tokens = min(request.target - request.computed, share, limit)
            num_drafts = self._fit_drafts(request, min(wanted.get(request.id, 0), share - num_tokens))
            if self._make_room(request, request.computed + num_tokens + num_drafts, step):
                self._look_ahead(request, num_tokens + num_drafts)
                most_right = min(num_drafts, self.speculation.max_depth)
                step.add(request, num_tokens, num_drafts=num_drafts, most_right=most_right, fresh=False)
                self.blocks.publish(request)

    def _want_drafts(self, running: Sequence[Request]) -> Mapping[str, int]:
        """How many drafts are to be verified, by request: of those whose newest token is all that is to be computed."""
        decodes = [request for request in running if request.target - request.computed == 1]
        in_the_making = bool(self._in_flight and self._in_flight[-1][0].proposes)
        able = [r for r in decodes if (in_the_making if r.pending else r.drafts.tokens)]
        return self.speculation.choose(able, len(decodes) - len(able))

    def _fit_drafts(self, request: Request, wanted: int) -> int:
        """How many of the wanted drafts the request's length and the free blocks allow: nobody gives way to a draft.

        Each has a place in KV memory, so a tree may not have more than there can be tokens, however flat it is.
        """
        count = min(wanted, request.max_total - 1 - request.target)
        while count > 0 and self.blocks.missing(request, request.target + count) > self.blocks.num_free:
            count -= 1
        return max(count, 0)

    def _look_ahead(self, request: Request, num_tokens: int) -> None:
        """Room for drafts of what follows its next tokens, if there is some: a request can do without."""
        ahead = self.speculation.lookahead if self.speculation.proposes else 0
        self.blocks.grow(request, min(request.computed + num_tokens + ahead, request.max_total - 1))

    def _make_room(self, request: Request, num_tokens: int, step: StepBuilder) -> bool:
        """Grow the request's table, preempting others that are not in this step; False if it must wait."""
        while not self.blocks.grow(request, num_tokens):
            candidates = (
                other
                for other in self._running
                if other is not request and other not in step and not may_end_in_flight(other)
            )
            num_needed = self.blocks.missing(request, num_tokens) - self.blocks.num_free
            victim = choose_victim(candidates, num_needed, self.blocks, self._running.rank)
            if victim is None:
                return False
            self._preempt(victim)
            step.preempted.append(victim.id)
        return True

    def _plan_waiting(self, step: StepBuilder) -> None:
        # The ledger: blocks that admitted requests still need for tokens that they have already. It also keeps
        # everybody out while a running request waits for blocks: that one needs more of them than there are.
        reserved = sum(self.blocks.missing(request, request.known) for request in self._running)
        num_blocked = 0
        for request in tuple(self._waiting):
            if step.budget == 0 or not self._free_rows:
                break
            if not self._is_ready(request, step):
                continue
            prefix = self._find_place(request, step, reserved)
            if prefix is not None:
                self._admit(request, prefix, step)
                reserved += self.blocks.missing(request, request.known)
                if num_blocked:
                    self._patience.note_overtaken()
            else:
                num_blocked += 1
                if num_blocked == 1:
                    self._patience.note_blocked(request)
            if num_blocked == _MAX_BLOCKED or (num_blocked and self._patience.exhausted):
                break

    def _is_ready(self, request: Request, step: StepBuilder) -> bool:
        """Whether the request could start at all; one that could not lets others pass without limit."""
        if request.pending or step.awaits_sibling(request):
            return False
        return all(rule.holds_place or rule.admits(request, self._running) for rule in self._admission)

    def _find_place(self, request: Request, step: StepBuilder, reserved: int) -> Prefix | None:
        """The prefix from which the request can start in this step, None if it cannot."""
        if not all(rule.admits(request, self._running) for rule in self._admission if rule.holds_place):
            return None
        prefix = self.blocks.match(request)
        sibling = request.fork_of
        if sibling is not None and sibling.row >= 0 and step.computed_before(sibling) >= len(request.prompt):
            prefix = max(self.blocks.fork(request, sibling), prefix, key=lambda known: known.num_tokens)
        # A resumed request may have grown past the budget of a step: it gets a step for itself.
        whole = self._chunked or request.known - prefix.num_tokens <= step.budget or not step.requests
        slack = _RESUME_SLACK * len(self._running) if request.preemptions else 0
        return prefix if whole and self.blocks.fits(prefix, request.known, reserved + slack) else None

    def _admit(self, request: Request, prefix: Prefix, step: StepBuilder) -> None:
        num_tokens = min(request.known - prefix.num_tokens, step.budget, self._chunk_limit())
        copy = self.blocks.allocate(request, prefix, prefix.num_tokens + num_tokens)
        if copy is not None:
            step.copies.append(copy)
        if request.preemptions == 0:
            request.scheduled_at = time.monotonic()
            if request.fork_of is None:
                self.prompt_tokens_total += len(request.prompt)
        self._waiting.remove(request)
        self._running.add(request)
        request.row = self._free_rows.pop()
        for rule in self._admission:
            rule.note_admitted(request)
        self._look_ahead(request, num_tokens)
        step.add(request, num_tokens, fresh=True)
        self.blocks.publish(request)

    def _chunk_limit(self) -> int:
        """Most tokens that one request may compute in this step."""
        alone = len(self._requests) == 1
        return self._long_threshold if self._long_threshold and self._chunked and not alone else self._budget

    # --- booking

    def _take_in_flight(self, plan: StepPlan) -> list[Request]:
        """The requests of a plan's rows. Steps settle in order; a failed one is skipped if its requests have ended."""
        while self._in_flight:
            oldest, requests = self._in_flight.popleft()
            if oldest is plan:
                return requests
            if any(request.finish is None for request in requests):
                raise AssertionError("a step is settled before an older one whose requests still run")
        raise AssertionError("a step is settled that is not in flight")

    def _settle(
        self, request: Request, num_drafts: int, tokens: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...] | None
    ) -> TokenEvent:
        """Append sampled tokens, all but the last of which were drafts, up to the first that ends the request."""
        num_kept, reason = append_tokens(request, tokens, num_drafts)
        self.generation_tokens_total += num_kept
        self.blocks.publish(request)
        if reason is not None:
            self._finish(request, reason)
        drafts = (num_drafts, min(num_kept, len(tokens) - 1))
        return event_of(request, tokens[:num_kept], None if logprobs is None else logprobs[:num_kept], drafts)

    def _preempt(self, request: Request) -> None:
        """Take row and blocks from a running request; it computes its tokens anew when it comes back."""
        self._leave(request)
        request.preemptions += 1
        self.preemptions_total += 1
        self._waiting.add(request)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.ended_at = time.monotonic()  # first: who sees the reason from another thread asks when
        request.finish = reason
        self.speculation.forget(request)
        if request.row >= 0:
            self._leave(request)
        else:  # preempted while its last token was in flight, or never started
            self._waiting.remove(request)
        del self._requests[request.id]

    def _leave(self, request: Request) -> None:
        self._running.remove(request)
        self.blocks.release(request)
        self._free_rows.append(request.row)
        request.row = -1
        request.drafts = NO_DRAFTS
        for rule in self._admission:
            rule.note_released(request)
