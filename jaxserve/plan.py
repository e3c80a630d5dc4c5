"""The treaty between scheduler and runner: what one step computes, and what came out of it.

The scheduler writes a ``StepPlan``, the runner reads it and answers with a ``StepResult``; neither knows the other.
Both sides are plain host data: no jax here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxserve.sampling_params import SamplingParams

__all__ = [
    "DEVICE_TOKEN",
    "NO_DRAFTS",
    "BlockCopy",
    "Drafts",
    "PromptPart",
    "PromptRead",
    "RowPlan",
    "StepPlan",
    "StepResult",
    "TokenLogprobs",
]

DEVICE_TOKEN = -1
"""Stands in ``RowPlan.tokens`` for the token that the step in flight will sample: its id is on the device only."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """Guesses of a row's next tokens: nodes of a tree whose root is the row's newest token, parents before children.

    Attributes:
        tokens: their ids, at most as many as drafts are asked for, the most promising first.
        parents: per draft the node that it follows: 0 is the root, j the j-th draft, counted from 1.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()


NO_DRAFTS = Drafts()


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the KV of block ``source`` to block ``target`` in all layers, before anything of the step is written."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class PromptRead:
    """What is to be read of a row's first tokens, which are of its prompt.

    Attributes:
        num_tokens: how many.
        completes: whether they are the last of the prompt.
        targets: ids of the tokens that follow them in the prompt, if their log probabilities are wanted; else empty.
        num_top: how many of the likeliest tokens are wanted with each.
        pooling: what to make of their hidden states: "mean" adds them up, "last" takes that of the prompt's last token,
            "" nothing.
    """

    num_tokens: int
    completes: bool
    targets: tuple[int, ...] = ()
    num_top: int = 0
    pooling: str = ""


@dataclass(frozen=True, slots=True)
class RowPlan:
    """One request's share of a step.

    Attributes:
        request_id: whose row this is.
        row: index in the device state.
        start: position of the first token to compute; while drafts of the row are in flight, its upper bound.
        num_tokens: how many tokens to compute, drafts included.
        tokens: ids of those that are no drafts; the last may be DEVICE_TOKEN.
        num_drafts: how many drafts follow them, to be verified; the device has their ids.
        samples: whether a token is sampled after the last one (False for all but the last chunk of a prompt).
        fresh: the row was just given to this request: device state is set up from this plan.
        history: known token ids of the request if fresh, else empty.
        num_prompt: how many of the request's tokens are prompt.
        block_ids: the request's block table.
        params, seed: how to sample.
        adapter_slot: slot of its adapter, 0 for the base model.
        read: what is wanted of its tokens beside their KV, None for nothing.
        private: nothing that the request generates may help to guess what others do.
    """

    request_id: str
    row: int
    start: int
    num_tokens: int
    tokens: tuple[int, ...]
    num_drafts: int
    samples: bool
    fresh: bool
    history: tuple[int, ...]
    num_prompt: int
    block_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    adapter_slot: int = 0
    private: bool = False
    read: PromptRead | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything that one step computes, and whether it makes drafts of what follows. An empty plan is falsy."""

    rows: tuple[RowPlan, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    preempted: tuple[str, ...] = ()
    proposes: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @property
    def kind(self) -> str:
        """What its rows do: ``decode`` or, with drafts, ``verify``; ``prefill``; or some of both, ``mixed``."""
        decodes = [row.num_tokens - row.num_drafts == 1 for row in self.rows]
        if all(decodes):
            return "verify" if any(row.num_drafts for row in self.rows) else "decode"
        return "mixed" if any(decodes) else "prefill"

    def __bool__(self) -> bool:
        return bool(self.rows)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one sampled position, from the raw logits.

    Attributes:
        logprob: of the sampled token (natural logarithm).
        rank: of the sampled token, 1 is the likeliest.
        top: (token id, log probability) of the likeliest tokens, best first; as many as asked.
    """

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class PromptPart:
    """What a step read of a prompt.

    Attributes:
        start: position of the first token that was read; 0 begins anew.
        logprobs: of the tokens from ``start + 1`` on, if they were wanted.
        pooled: [E] numpy float64, the sum of hidden states or the last one; None for none.
        completes: nothing of the prompt is left to read.
    """

    start: int
    logprobs: tuple[TokenLogprobs, ...]
    pooled: Any
    completes: bool


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step sampled, in the order of ``StepPlan.rows``.

    Attributes:
        tokens: per row the sampled token ids, empty where ``samples`` is False; more than one with accepted drafts.
        logprobs: per row one entry per token, or None where not asked.
        drafts: per row the drafts that were proposed to follow its tokens; empty if nobody proposes.
        parts: per row what was read of its prompt, or None; empty if nobody wanted anything.
    """

    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[TokenLogprobs, ...] | None, ...]
    drafts: tuple[Drafts, ...] = ()
    parts: tuple[PromptPart | None, ...] = ()
