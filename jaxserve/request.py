"""One request inside the engine: token ids in, token ids out.

A request has no phase. Its ``computed`` count chases its ``target``; prompt chunks, cached prefixes, decodes and
resumed requests differ only in how far behind it is. Mutated by the scheduler and the block manager alone, on the
engine thread.
"""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field, replace
from typing import Any

from jaxserve.plan import NO_DRAFTS, Drafts
from jaxserve.sampling_params import SamplingParams

__all__ = ["FinishReason", "Request", "SpeculationStats"]


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True)
class SpeculationStats:
    """What became of drafts: of all since start, or of one request.

    Attributes:
        num_drafts: how often a sequence had drafts verified.
        num_draft_tokens, num_accepted_tokens: drafts verified, and of these the right ones.
        accepted_by_position: right ones by their place on the path, from the first.
        disabled: how often speculation was paused, by reason.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_by_position: list[int] = field(default_factory=list)
    disabled: dict[str, int] = field(default_factory=dict)

    def note(self, num_drafts: int, num_accepted: int) -> None:
        """A sequence had ``num_drafts`` drafts verified, of which a path of ``num_accepted`` was right."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        self.accepted_by_position += [0] * (num_accepted - len(self.accepted_by_position))
        for position in range(num_accepted):
            self.accepted_by_position[position] += 1

    def note_disabled(self, reason: str) -> None:
        """Speculation was paused."""
        self.disabled[reason] = self.disabled.get(reason, 0) + 1

    def copy(self) -> SpeculationStats:
        """A copy that stays as it is."""
        return replace(self, accepted_by_position=list(self.accepted_by_position), disabled=dict(self.disabled))


@dataclass(slots=True, eq=False)
class Request:
    """State of one request.

    Attributes:
        id: unique while the request lives.
        prompt: token ids of the prompt, at least one.
        params: what was asked, with ``n == 1`` (a request for n completions is n requests, see ``fork_of``).
        seed: 64-bit seed of the noise, always set.
        stop_ids: token ids that end the output (end-of-sequence tokens and ``stop_token_ids``).
        max_total: most tokens of prompt and output together.
        fork_of: the sibling whose prompt blocks this request takes over instead of computing its own.
        adapter: key of the adapter's content, None for the base model.
        cache_salt: prefix blocks are shared only between requests of one salt.
        priority: lower is served first, under the priority policy.
        arrived_at: ``time.monotonic()`` of arrival, seconds.
        output: settled output token ids.
        computed: number of tokens whose KV is written by the steps dispatched so far, if all drafts are right that can.
        pending: number of output tokens sampled by steps in flight, not yet read, if all drafts are right that can.
        drafts: the newest drafts of what follows ``output`` that the host has seen.
        blocks: ids of the blocks that hold its KV, in order.
        hashes: chained hashes of its full blocks, as far as they were needed.
        published: number of its blocks, from the first, that were offered to the prefix cache.
        row: index in the device state, -1 when not running.
        adapter_slot: slot of its adapter while it runs, else 0, as for the base model.
        cached: prompt tokens that the prefix cache supplied at first admission.
        miss: why it did not supply more (see ``PrefixCache``), "" where it was not asked.
        owed: tokens that were known when it was admitted last: what of them has no KV is computed in chunks.
        chunks: tokens of each such chunk.
        preemptions: how often it lost its blocks.
        recomputed: tokens that it therefore had to compute once more.
        speculation: what became of its drafts.
        pooling: what is made of the prompt's hidden states: "mean", "last", or "" for nothing.
        is_read: all that is wanted of its prompt beside the KV is known.
        constraint: what its next token may be (see ``structured``), None for anything.
        scheduled_at, first_token_at, ended_at: ``time.monotonic()`` of first admission, first token, end; 0.0 before.
        finish, stop_reason: why it ended, and the stop token id if one did it.
    """

    id: str
    prompt: list[int]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    max_total: int
    fork_of: Request | None = None
    adapter: bytes | None = None
    cache_salt: str | None = None
    priority: int = 0
    arrived_at: float = field(default_factory=time.monotonic)
    output: list[int] = field(default_factory=list)
    computed: int = 0
    pending: int = 0
    drafts: Drafts = NO_DRAFTS
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    published: int = 0
    row: int = -1
    adapter_slot: int = 0
    cached: int = 0
    miss: str = ""
    owed: int = 0
    chunks: list[int] = field(default_factory=list)
    preemptions: int = 0
    recomputed: int = 0
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    pooling: str = ""
    is_read: bool = False
    constraint: Any = None
    scheduled_at: float = 0.0
    first_token_at: float = 0.0
    ended_at: float = 0.0
    finish: FinishReason | None = None
    stop_reason: int | None = None

    @property
    def reads_prompt(self) -> bool:
        """Whether its prompt must be computed even where its KV is known: something else is wanted of it."""
        return not self.is_read and (self.params.prompt_logprobs is not None or bool(self.pooling))

    @property
    def known(self) -> int:
        """Number of tokens whose ids the host knows."""
        return len(self.prompt) + len(self.output)

    @property
    def target(self) -> int:
        """Number of tokens that exist, on the host or on the device, if all drafts in flight are right."""
        return self.known + self.pending

    def tokens(self, start: int, stop: int) -> list[int]:
        """Known token ids at positions ``start`` .. ``stop - 1``; positions past ``known`` are left out."""
        num_prompt = len(self.prompt)
        if stop <= num_prompt:
            return self.prompt[start:stop]
        if start >= num_prompt:
            return self.output[start - num_prompt : stop - num_prompt]
        return self.prompt[start:] + self.output[: stop - num_prompt]
