"""Token events of the engine to the outputs that users see.

Each completion turns its tokens into text one by one, so that what comes out does not depend on how the engine grouped
them into steps. A streamed answer and a whole one are the same parts, handed out as they come or added up.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from jaxserve.errors import RequestError
from jaxserve.live import Latency
from jaxserve.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, TokenEvent
from jaxserve.plan import PromptPart, TokenLogprobs
from jaxserve.request import FinishReason, Request
from jaxserve.tokenizer import IncrementalDetokenizer, StopMatcher, Tokenizer, replace_surrogates

__all__ = ["OutputProcessor"]


class OutputProcessor:
    """Holds every request that is being answered; used from one thread.

    Attributes:
        latency: is told of every token while somebody looks, None while nobody does.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._answers: dict[str, _Answer] = {}
        self._completions: dict[str, _Completion] = {}
        self.latency: Latency | None = None

    def add(self, request_id: str, prompt_text: str | None, requests: Sequence[Request], *, stream: bool) -> None:
        """Expect events of ``requests``, the completions of one user request in order of their index.

        With ``stream`` each output carries what is new; without, one output carries everything at the end. Raises
        RequestError if the id, or an engine request's, is in use.
        """
        taken = [r.id for r in requests if r.id in self._completions]
        if request_id in self._answers or taken:
            raise RequestError(f"request_id {request_id!r} is in use.", "request_id")
        text = None if prompt_text is None else replace_surrogates(prompt_text)
        answer = _Answer(request_id, text, stream, _Prompt(requests[0], self._tokenizer))
        answer.completions = [_Completion(answer, i, r, self._tokenizer) for i, r in enumerate(requests)]
        answer.metrics.arrived_at = requests[0].arrived_at
        self._answers[request_id] = answer
        self._completions.update((c.request.id, c) for c in answer.completions)

    def process(self, events: Iterable[TokenEvent]) -> tuple[list[RequestOutput], list[str]]:
        """Outputs that the events make, one per user request at most, and ids of engine requests to finish.

        The latter matched a stop string while the engine still runs them. Events of unknown ids are those of requests
        that were dropped or ended by a stop string; they are ignored.
        """
        now = time.monotonic()
        touched: dict[str, _Answer] = {}
        stopped: list[str] = []
        for event in events:
            completion = self._completions.get(event.request_id)
            if completion is None:
                continue
            touched[completion.answer.request_id] = completion.answer
            if event.part is not None:
                completion.answer.prompt.take(event.part)
            completion.take(event, now)
            if event.token_ids:
                self._note_tokens(completion, len(event.token_ids), now)
            if completion.finished:
                del self._completions[event.request_id]
                if event.finish is None:
                    stopped.append(event.request_id)
        outputs = [output for answer in touched.values() if (output := answer.output(now)) is not None]
        for output in outputs:
            if output.finished:
                del self._answers[output.request_id]
        return outputs, stopped

    def _note_tokens(self, completion: _Completion, num_tokens: int, now: float) -> None:
        before, completion.newest_at = completion.newest_at, now
        if self.latency is None:
            return
        if before:
            self.latency.note_next(num_tokens, now - before, now)
        else:
            self.latency.note_first(now - completion.request.arrived_at, now)

    def has_begun(self, request_id: str) -> bool:
        """Whether a user request that has not ended has a first token."""
        answer = self._answers.get(request_id)
        return answer is not None and answer.metrics.first_token_at > 0.0

    def open_ids(self, request_id: str) -> list[str]:
        """Ids of the engine requests of a user request that have not ended; none if it is unknown."""
        answer = self._answers.get(request_id)
        return [c.request.id for c in answer.completions if not c.finished] if answer is not None else []

    def drop(self, request_id: str) -> list[str]:
        """Forget a user request; answers its ``open_ids``, for the engine to abort."""
        open_ids = self.open_ids(request_id)
        self._answers.pop(request_id, None)
        for engine_id in open_ids:
            del self._completions[engine_id]
        return open_ids


@dataclass(slots=True, eq=False)
class _Answer:
    """One user request."""

    request_id: str
    prompt_text: str | None
    stream: bool
    prompt: _Prompt
    completions: list[_Completion] = field(default_factory=list)
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    def output(self, now: float) -> RequestOutput | None:
        """What there is to hand out, None for nothing."""
        finished = all(c.finished for c in self.completions)
        if finished:
            self.metrics.finished_at = now
        elif not self.stream:
            return None
        outputs = [part for c in self.completions if (part := c.hand_out()) is not None]
        if not outputs:
            return None
        self.metrics.num_preemptions = sum(c.num_preemptions for c in self.completions)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt_text,
            prompt_token_ids=self.completions[0].request.prompt,
            outputs=outputs,
            finished=finished,
            num_cached_tokens=self.completions[0].num_cached,
            metrics=replace(self.metrics, speculation=self.metrics.speculation.copy()),
            prompt_logprobs=self.prompt.hand_out(),
            embedding=self.prompt.embedding if finished else None,
        )


class _Prompt:
    """What was read of a prompt so far."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._sum: NDArray[np.float64] | None = None
        self._logprobs: list[dict[int, Logprob] | None] | None = None
        if request.params.prompt_logprobs is not None:
            self._logprobs = [None] * len(request.prompt)

    def take(self, part: PromptPart) -> None:
        """Add what a step read. A request that was preempted begins anew."""
        if part.start == 0:
            self._sum = None
        if part.pooled is not None:
            self._sum = part.pooled if self._sum is None else self._sum + part.pooled
        for position, entry in enumerate(part.logprobs, start=part.start + 1):
            assert self._logprobs is not None, "nobody asked"
            self._logprobs[position] = _shown(self._tokenizer, self._request.prompt[position], entry)

    def hand_out(self) -> list[dict[int, Logprob] | None] | None:
        """Log probabilities, once; the prompt is read before the first token is sampled."""
        logprobs, self._logprobs = self._logprobs, None
        return logprobs

    @property
    def embedding(self) -> NDArray[np.float32] | None:
        """The pooled hidden states."""
        if self._sum is None:
            return None
        mean = self._request.pooling == "mean"
        return (self._sum / (len(self._request.prompt) if mean else 1)).astype(np.float32)


class _Completion:
    """One completion: its state between events, and the part of it that was not handed out yet."""

    def __init__(self, answer: _Answer, index: int, request: Request, tokenizer: Tokenizer) -> None:
        params = request.params
        self.answer = answer
        self.request = request
        self.num_preemptions = 0
        self.num_cached = 0
        self.finished = False
        self.newest_at = 0.0
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer, request.prompt, params.skip_special_tokens)
        self._matcher = StopMatcher(params.stop, params.include_stop_str_in_output)
        self._num_tokens = 0
        self._texts: list[str] = []  # of the new part: joined once, when it is handed out
        self._new = _empty(index, 0.0 if params.logprobs is not None else None)

    def take(self, event: TokenEvent, now: float) -> None:
        """Add the tokens of an event, up to the one that completes a stop string."""
        before = self._num_tokens
        self._add(event, now)
        if event.num_drafts:
            num_accepted = min(event.num_accepted, self._num_tokens - before)
            self.answer.metrics.speculation.note(event.num_drafts, num_accepted)

    def hand_out(self) -> CompletionOutput | None:
        """What is new since the last time, None for nothing."""
        new = self._new
        if not new.token_ids and new.finish_reason is None:
            return None
        new.text = "".join(self._texts)
        self._texts.clear()
        self._new = _empty(new.index, new.cumulative_logprob)
        return new

    def _add(self, event: TokenEvent, now: float) -> None:
        metrics = self.answer.metrics
        self.num_preemptions = max(self.num_preemptions, event.num_preemptions)
        self.num_cached = max(self.num_cached, event.num_cached)
        metrics.scheduled_at = metrics.scheduled_at or event.scheduled_at
        if event.token_ids:
            metrics.first_token_at = metrics.first_token_at or now
        # Behind a prompt that was only to be read, a token is sampled all the same, and nobody's.
        only_read = self.request.pooling or self.request.params.max_tokens == 0
        for i, token in enumerate(() if only_read else event.token_ids):
            self._new.token_ids.append(token)
            self._num_tokens += 1
            if self._new.logprobs is not None and event.logprobs is not None:
                self._new.logprobs.append(_shown(self._tokenizer, token, event.logprobs[i]))
                self._new.cumulative_logprob = (self._new.cumulative_logprob or 0.0) + event.logprobs[i].logprob
            ends = event.finish is FinishReason.STOP and i == len(event.token_ids) - 1
            if ends and not self.request.params.include_stop_str_in_output:
                break  # the token that ends the output is no part of its text
            if self._match(self._detokenizer.push((token,))):
                return
        if event.finish is not None and not self._match(self._detokenizer.flush()):
            self._texts.append(self._matcher.flush())
            reason = FinishReason.LENGTH if only_read and event.finish is FinishReason.STOP else event.finish
            self._finish(reason.value, event.stop_reason)
            self._new.error = event.error

    def _match(self, text: str) -> bool:
        # As long as min_tokens is not exceeded, a stop string is ordinary text.
        text, matched = self._matcher.push(text, armed=self._num_tokens > self.request.params.min_tokens)
        self._texts.append(text)
        if matched is not None:
            self._finish(FinishReason.STOP.value, matched)
        return matched is not None

    def _finish(self, reason: str, stop_reason: str | int | None) -> None:
        self.finished = True
        self._new.finish_reason = reason
        self._new.stop_reason = stop_reason


def _shown(tokenizer: Tokenizer, token: int, entry: TokenLogprobs) -> dict[int, Logprob]:
    """The token in question first, then the likeliest ones."""
    shown = {token: Logprob(entry.logprob, entry.rank, tokenizer.token_text(token))}
    for rank, (other, logprob) in enumerate(entry.top, start=1):
        shown.setdefault(other, Logprob(logprob, rank, tokenizer.token_text(other)))
    return shown


def _empty(index: int, cumulative_logprob: float | None) -> CompletionOutput:
    """A part without content; a sum of log probabilities, even 0, says that they were asked for."""
    return CompletionOutput(
        index, logprobs=None if cumulative_logprob is None else [], cumulative_logprob=cumulative_logprob
    )
