"""The two ends of a request: what can be served at all, and which token is its last."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from jaxserve.blocks import BlockManager
from jaxserve.errors import RequestError
from jaxserve.outputs import TokenEvent
from jaxserve.plan import PromptPart, TokenLogprobs
from jaxserve.request import FinishReason, Request

__all__ = ["append_tokens", "check_servable", "event_of", "note_read"]


def check_servable(request: Request, blocks: BlockManager, max_prompt: int | None) -> None:
    """RequestError if the request could never be served.

    ``max_prompt`` is the largest prompt in tokens that a step takes, None where prompts may be cut into chunks.
    """
    num_prompt = len(request.prompt)
    if not 0 < num_prompt < request.max_total:
        raise RequestError(
            f"prompt has {num_prompt} tokens; it must have at least 1 and leave room for one more in the "
            f"{request.max_total} tokens of prompt and output together.",
            "prompt",
        )
    if max_prompt is not None and num_prompt > max_prompt:
        raise RequestError(
            f"prompt has {num_prompt} tokens, but without chunked prefill a step takes at most "
            f"max_num_batched_tokens ({max_prompt}).",
            "prompt",
        )
    needed = blocks.blocks_for(request.max_total - 1)
    if needed > blocks.num_blocks - 1:
        raise RequestError(
            f"prompt and output of up to {request.max_total} tokens need {needed} KV blocks; there are "
            f"{blocks.num_blocks - 1}.",
            "max_tokens",
        )


def append_tokens(request: Request, tokens: tuple[int, ...], num_drafts: int) -> tuple[int, FinishReason | None]:
    """Append sampled tokens up to the first that ends the request; how many were kept, and why it ended if it did.

    ``num_drafts`` were verified to get them; all but the last are such drafts.
    """
    if not request.output:
        request.first_token_at = time.monotonic()
    num_kept, reason = _append(request, tokens)
    if num_drafts:
        request.speculation.note(num_drafts, min(num_kept, len(tokens) - 1))
    return num_kept, reason


def _append(request: Request, tokens: tuple[int, ...]) -> tuple[int, FinishReason | None]:
    for num_kept, token in enumerate(tokens, start=1):
        request.output.append(token)
        if token in request.stop_ids:
            request.stop_reason = token if token in request.params.stop_token_ids else None
            return num_kept, FinishReason.STOP
        if request.known >= request.max_total:
            return num_kept, FinishReason.LENGTH
    return len(tokens), None


def event_of(
    request: Request,
    tokens: tuple[int, ...] = (),
    logprobs: tuple[TokenLogprobs, ...] | None = None,
    drafts: tuple[int, int] = (0, 0),
) -> TokenEvent:
    """What the engine is told of a request: its new tokens, and whether it has ended.

    ``drafts`` is how many were verified to get these tokens, and how many of the tokens were drafts.
    """
    return TokenEvent(
        request_id=request.id,
        token_ids=tokens,
        logprobs=logprobs,
        finish=request.finish,
        stop_reason=request.stop_reason,
        num_cached=request.cached,
        scheduled_at=request.scheduled_at,
        num_preemptions=request.preemptions,
        num_drafts=drafts[0],
        num_accepted=drafts[1],
    )


def note_read(requests: Sequence[Request], parts: Sequence[PromptPart | None]) -> list[TokenEvent]:
    """What the engine is told of prompts that a step has read: ``parts`` by request, or none at all."""
    events = []
    for request, part in zip(requests, parts, strict=False):
        if part is not None and request.finish is None:
            request.is_read |= part.completes
            events.append(replace(event_of(request), part=part))
    return events
