"""What comes out: token events of the engine, and the outputs that users see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from jaxserve.plan import PromptPart, TokenLogprobs
from jaxserve.request import FinishReason, SpeculationStats
from jaxserve.timings import GRAMMAR_EDGES, Timings

__all__ = [
    "AdapterInfo",
    "AdapterStats",
    "CompletionOutput",
    "EmbeddingOutput",
    "EngineStats",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "ScoringOutput",
    "SpeculationStats",
    "TokenEvent",
]


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """New tokens of one engine request, or its end; ids only.

    Attributes:
        request_id: the engine request.
        token_ids: new token ids, maybe none.
        logprobs: one entry per token, or None if not asked.
        finish: why the request ended, None while it runs.
        stop_reason: the stop token id that ended it, if one of ``stop_token_ids`` did.
        num_cached: prompt tokens that the prefix cache supplied.
        scheduled_at: ``time.monotonic()`` of first admission.
        num_preemptions: how often it was preempted so far.
        num_drafts, num_accepted: drafts verified to get these tokens, and how many of the tokens are such drafts.
        part: what was read of its prompt, None for nothing.
        error: message, if ``finish`` is ERROR.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish: FinishReason | None = None
    stop_reason: int | None = None
    num_cached: int = 0
    scheduled_at: float = 0.0
    num_preemptions: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    part: PromptPart | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log probability of one token as shown to users (vLLM's shape)."""

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a request.

    Attributes:
        index: 0 .. n-1.
        text: the output's text so far; with streaming, the new part only.
        token_ids: its token ids; with streaming, the new ones only.
        logprobs: per token id a dict token id -> Logprob, or None if not asked.
        cumulative_logprob: sum over the tokens, or None if not asked.
        finish_reason: "stop", "length", "abort" or "error"; None while it runs.
        stop_reason: the stop string or stop token id that ended it, else None.
        error: message, if ``finish_reason`` is "error".
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None


@dataclass(slots=True)
class RequestMetrics:
    """``time.monotonic()`` of a request's events, in seconds; 0.0 where it did not happen yet. And what they were.

    Attributes:
        num_preemptions: how often its sequences lost their KV memory.
        speculation: what became of the drafts of its sequences so far; those past the end of a text are not accepted.
    """

    arrived_at: float = 0.0
    scheduled_at: float = 0.0
    first_token_at: float = 0.0
    finished_at: float = 0.0
    num_preemptions: int = 0
    speculation: SpeculationStats = field(default_factory=SpeculationStats)


@dataclass(slots=True)
class RequestOutput:
    """A request's answer; while streaming, its newest part.

    Attributes:
        request_id: the id given at submission.
        prompt: the prompt's text, None if it came as token ids.
        prompt_token_ids: the prompt as the model saw it.
        outputs: one entry per completion; while streaming, only those with something new.
        finished: all completions have ended.
        num_cached_tokens: prompt tokens that the prefix cache supplied.
        prompt_logprobs: per prompt token a dict token id -> Logprob, None for the first one; None if they were not
            asked, and in the later parts of a stream.
        embedding: float32 [E], what the model makes of the prompt, if that was asked.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    embedding: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingOutput:
    """What the model makes of a prompt: float32 [E], or as many dimensions as were asked."""

    request_id: str
    prompt_token_ids: list[int]
    embedding: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """How likely a text is after another: the mean log probability of its tokens."""

    request_id: str
    prompt_token_ids: list[int]
    score: float


@dataclass(frozen=True, slots=True)
class AdapterStats:
    """How adapters share the device's slots.

    Attributes:
        num_slots: slots on the device.
        running: names of adapters that sequences of the batch have.
        waiting: names of others that requests wait for.
        evictions_total: adapters that gave up their slot to another one.
        load_seconds: how long it took from the first request for an adapter without a slot until it was in one.
    """

    num_slots: int
    running: tuple[str, ...]
    waiting: tuple[str, ...]
    evictions_total: int
    load_seconds: Timings


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts of the engine at one moment; those named ``total`` only grow.

    Attributes:
        num_running, num_waiting: requests by state.
        num_preparing: requests that wait for their tokens or their grammar, before they are queued.
        num_blocks, num_free_blocks: KV blocks in all (without the null block), and of those not in use by a request
            (they may still hold reusable prefixes).
        num_cached_blocks: of the latter, those that do.
        prefix_misses: prompt tokens that were not found in the prefix cache, by the reason why.
        recomputed_tokens_total: tokens that were computed once more after a preemption.
        prefix_queries_total, prefix_hits_total: prompt tokens looked up in the prefix cache, and found there.
        preemptions_total, prompt_tokens_total, generation_tokens_total, steps_total: since start.
        runtime_compiles_total: programs compiled after warm-up; 0 unless something is wrong.
        last_step_tokens, last_step_padded: tokens computed by the newest step, and its bucket's size.
        last_step_kv_tokens, last_step_kv_slots: tokens with KV of the sequences in it, and places in their blocks.
        last_step_drafts: drafts verified per sequence of the newest step, on average.
        last_step_age: seconds since the newest step was done (or there was work), 0 while there is none.
        step_seconds: how long steps took, by kind: decode, verify (decodes with drafts), prefill, mixed.
        grammar_seconds: how long requests waited for their grammars.
        step_sizes: number of steps since start, by the tokens that they computed.
        speculation: what became of drafts.
        adapters: how adapters share their slots, None where there are none.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_preparing: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    prefix_queries_total: int = 0
    prefix_hits_total: int = 0
    prefix_misses: Mapping[str, int] = field(default_factory=dict)
    preemptions_total: int = 0
    recomputed_tokens_total: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    steps_total: int = 0
    runtime_compiles_total: int = 0
    last_step_tokens: int = 0
    last_step_padded: int = 0
    last_step_kv_tokens: int = 0
    last_step_kv_slots: int = 0
    last_step_drafts: float = 0.0
    last_step_age: float = 0.0
    step_seconds: Mapping[str, Timings] = field(default_factory=dict)
    grammar_seconds: Timings = field(default_factory=lambda: Timings(GRAMMAR_EDGES))
    step_sizes: Mapping[int, int] = field(default_factory=dict)
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    adapters: AdapterStats | None = None

    @property
    def kv_usage(self) -> float:
        """Share of blocks in use by requests, 0..1."""
        return 1.0 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0

    @property
    def kv_waste(self) -> float:
        """Share of the newest step's blocks that holds no token yet, 0..1: fragmentation within blocks."""
        return 1.0 - self.last_step_kv_tokens / self.last_step_kv_slots if self.last_step_kv_slots else 0.0


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """What is known of a named adapter.

    Attributes:
        name, path: as they were given.
        base_model: the name of its base model as it was given, or as its trainer has noted it.
        key: hex digest of its content.
        rank, targets: its largest rank, and the projections that it changes.
        num_bytes: of its factors.
        in_host: whether they are in host memory now.
        num_requests: requests that use it.
        slot: its slot on the device, None while it has none.
    """

    name: str
    path: str
    base_model: str | None
    key: str
    rank: int
    targets: tuple[str, ...]
    num_bytes: int
    in_host: bool
    num_requests: int
    slot: int | None = None
