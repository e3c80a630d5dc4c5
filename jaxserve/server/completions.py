"""``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxserve.metrics import Metrics
from jaxserve.outputs import CompletionOutput, Logprob, RequestOutput
from jaxserve.server.bodies import read_completion, read_large_completion
from jaxserve.server.generation import Answer, Job
from jaxserve.server.intake import Intake
from jaxserve.server.jsonio import respond
from jaxserve.server.logprobs import (
    EchoOffsets,
    TextOffsets,
    completion_logprobs,
    echoed_logprobs,
    joined_logprobs,
    prompt_logprobs,
)
from jaxserve.server.models import ServedModels
from jaxserve.server.prompts import prompts_of
from jaxserve.server.protocol import Engine
from jaxserve.server.schema import CompletionRequest
from jaxserve.server.sse import EventStream

__all__ = ["routes"]


def routes(engine: Engine, models: ServedModels, metrics: Metrics, intake: Intake) -> list[Route]:
    """Routes of this family."""

    async def create(request: Request) -> Response:
        body = await intake.read(request, read_completion, read_large_completion)
        model = models.resolve(body.model)
        structure = body.structure()
        params = body.sampling(structured_outputs=structure.params, **_candidates(body), **_of_prompt(body))
        prompts = await prompts_of(engine.tokenizer, body, engine.max_model_len)
        adapter = models.adapter(model)
        job = Job(body.new_id("cmpl"), model, prompts, params, body, structure.field, adapter)
        echoed = await run_in_threadpool(_echoed, engine, job) if body.echo else [""] * len(body.prompt)
        answer = _CompletionAnswer(engine, metrics, job, echoed)
        if body.stream:
            return EventStream(answer.events(), body.headers, late_headers=lambda: answer.headers)
        whole = await answer.whole()
        return respond(whole, headers={**body.headers, **answer.headers})

    return [Route("/v1/completions", create, methods=["POST"])]


def _candidates(body: CompletionRequest) -> dict[str, Any]:
    """Settings for more completions than are answered with, whose log probabilities say which are best."""
    if body.best_of in (None, body.num_choices):
        return {}
    return {"n": body.best_of, "logprobs": body.logprobs or 0}


def _of_prompt(body: CompletionRequest) -> dict[str, Any]:
    """Settings for what is wanted of prompts that are echoed: their log probabilities, and maybe nothing after them."""
    if not body.echo or (body.logprobs is None and body.max_tokens != 0):
        return {}
    return {"prompt_logprobs": max(body.logprobs or 0, body.prompt_logprobs or 0)}


def _echoed(engine: Engine, job: Job) -> list[str]:
    """The prompts as text."""
    keep_special = not job.params.skip_special_tokens
    return [
        prompt if isinstance(prompt, str) else engine.tokenizer.decode(prompt, skip_special_tokens=not keep_special)
        for prompt in job.prompts
    ]


class _CompletionAnswer(Answer):
    plain_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, engine: Engine, metrics: Metrics, job: Job, echoed: list[str]) -> None:
        super().__init__(engine, metrics, job)
        self._echoed = echoed
        self._offsets: dict[int, TextOffsets] = {}
        self._of_prompts: dict[int, list[dict[int, Logprob] | None]] = {}

    def picked(self, result: RequestOutput) -> Sequence[CompletionOutput]:
        """As many as were asked for: those of the highest log probability per token."""
        num_choices = self.body.num_choices
        if len(result.outputs) == num_choices:
            return result.outputs
        by_score = sorted(result.outputs, key=_log_probability_per_token, reverse=True)
        asked = self.body.logprobs is not None
        return [
            replace(output, index=index, logprobs=output.logprobs if asked else None)
            for index, output in enumerate(by_score[:num_choices])
        ]

    def choices(self, position: int, result: RequestOutput, output: CompletionOutput) -> Iterator[dict[str, Any]]:
        index, text = self.index(position, output), output.text
        if result.prompt_logprobs is not None:
            self._of_prompts[position] = result.prompt_logprobs
        first = index not in self._offsets
        if first:
            self._offsets[index] = TextOffsets(
                self._engine.tokenizer,
                skip_special=self._job.params.skip_special_tokens,
                as_ids=bool(self.body.return_tokens_as_token_ids),
                start=len(self._echoed[position]),
            )
            text = self._echoed[position] + text
        echoed = self._of_echo(position, result) if first else None
        logprobs = joined_logprobs(echoed, completion_logprobs(output, self._offsets[index]))
        if text or logprobs or output.finish_reason or (self.body.return_token_ids and output.token_ids):
            yield {
                "index": index,
                "text": text,
                "logprobs": logprobs,
                "finish_reason": output.finish_reason,
                "stop_reason": output.stop_reason,
                **self._extras(position, output, result if first else None),
            }

    @property
    def body(self) -> CompletionRequest:
        assert isinstance(self._job.body, CompletionRequest), "made for this endpoint"
        return self._job.body

    def _of_echo(self, position: int, result: RequestOutput) -> dict[str, Any] | None:
        shown = self._of_prompts.get(position)
        if shown is None or self.body.logprobs is None or not self.body.echo:
            return None
        as_ids = bool(self.body.return_tokens_as_token_ids)
        offsets = EchoOffsets(self._engine.tokenizer, self._echoed[position], result.prompt_token_ids, as_ids=as_ids)
        return echoed_logprobs(result.prompt_token_ids, shown, offsets, self.body.logprobs)

    def _extras(self, position: int, output: CompletionOutput, first: RequestOutput | None) -> dict[str, Any]:
        """What only some ask for; ``first`` is the result that a choice begins with."""
        extras: dict[str, Any] = {}
        if self.body.prompt_logprobs is not None:
            extras["prompt_logprobs"] = prompt_logprobs(self._of_prompts[position])
        if self.body.return_token_ids:
            extras["token_ids"] = output.token_ids
            extras["prompt_token_ids"] = None if first is None else first.prompt_token_ids
        return extras


def _log_probability_per_token(output: CompletionOutput) -> float:
    return (output.cumulative_logprob or 0.0) / max(len(output.token_ids), 1)
