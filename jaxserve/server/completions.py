"""``POST /v1/completions``."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxserve.metrics import Metrics
from jaxserve.outputs import CompletionOutput, RequestOutput
from jaxserve.server.generation import Answer, Job
from jaxserve.server.intake import Intake
from jaxserve.server.jsonio import respond
from jaxserve.server.logprobs import TextOffsets, completion_logprobs
from jaxserve.server.models import ServedModels
from jaxserve.server.protocol import Engine
from jaxserve.server.schema import CompletionRequest
from jaxserve.server.sse import EventStream

__all__ = ["routes"]


def routes(engine: Engine, models: ServedModels, metrics: Metrics, intake: Intake) -> list[Route]:
    """Routes of this family."""

    async def create(request: Request) -> Response:
        body = await intake.completion(request)
        model = models.resolve(body.model)
        structure = body.structure()
        params = body.sampling(structured_outputs=structure.params, **_candidates(body))
        job = Job(f"cmpl-{uuid.uuid4().hex}", model, body.prompt, params, body, structure.field)
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

    def picked(self, result: RequestOutput) -> Sequence[CompletionOutput]:
        """As many as were asked for: those of the highest log probability per token."""
        num_choices = self._job.body.num_choices
        if len(result.outputs) == num_choices:
            return result.outputs
        by_score = sorted(result.outputs, key=_log_probability_per_token, reverse=True)
        asked = getattr(self._job.body, "logprobs", None) is not None
        return [
            replace(output, index=index, logprobs=output.logprobs if asked else None)
            for index, output in enumerate(by_score[:num_choices])
        ]

    def choices(self, position: int, result: RequestOutput, output: CompletionOutput) -> Iterator[dict[str, Any]]:
        index, text = self.index(position, output), output.text
        if index not in self._offsets:
            self._offsets[index] = TextOffsets(self._engine.tokenizer)
            text = self._echoed[position] + text
        logprobs = completion_logprobs(output, self._offsets[index])
        if text or logprobs or output.finish_reason:
            yield {
                "index": index,
                "text": text,
                "logprobs": logprobs,
                "finish_reason": output.finish_reason,
                "stop_reason": output.stop_reason,
            }


def _log_probability_per_token(output: CompletionOutput) -> float:
    return (output.cumulative_logprob or 0.0) / max(len(output.token_ids), 1)
