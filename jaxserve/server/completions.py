"""``POST /v1/completions``."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxserve.metrics import Metrics
from jaxserve.outputs import CompletionOutput, RequestOutput
from jaxserve.server.generation import Answer, Job
from jaxserve.server.jsonio import read_object, respond
from jaxserve.server.logprobs import TextOffsets, completion_logprobs
from jaxserve.server.models import ServedModels
from jaxserve.server.protocol import Engine
from jaxserve.server.schema import CompletionRequest
from jaxserve.server.sse import EventStream

__all__ = ["routes"]


def routes(engine: Engine, models: ServedModels, metrics: Metrics) -> list[Route]:
    """Routes of this family."""

    async def create(request: Request) -> Response:
        body = CompletionRequest.parse(await read_object(request))
        model = models.resolve(body.model)
        job = Job(f"cmpl-{uuid.uuid4().hex}", model, body.prompt, body.sampling(), body, models.adapter(model))
        echoed = await run_in_threadpool(_echoed, engine, job) if body.echo else [""] * len(body.prompt)
        answer = _CompletionAnswer(engine, metrics, job, echoed)
        return await EventStream.open(answer.events()) if body.stream else respond(await answer.whole())

    return [Route("/v1/completions", create, methods=["POST"])]


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
