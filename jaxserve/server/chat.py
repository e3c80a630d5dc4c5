"""``POST /v1/chat/completions``."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxserve.errors import RequestError
from jaxserve.metrics import Metrics
from jaxserve.outputs import CompletionOutput, RequestOutput
from jaxserve.server.generation import Answer, Job
from jaxserve.server.jsonio import read_object, respond
from jaxserve.server.logprobs import chat_logprobs
from jaxserve.server.messages import render
from jaxserve.server.models import ServedModels
from jaxserve.server.protocol import Engine
from jaxserve.server.schema import ChatRequest
from jaxserve.server.sse import EventStream

__all__ = ["routes"]

_TEMPLATE_OWN = frozenset(
    {"add_generation_prompt", "chat_template", "continue_final_message", "messages", "return_dict", "tokenize", "tools"}
)
"""Names that ``chat_template_kwargs`` must leave alone: other parameters decide them."""


def routes(engine: Engine, models: ServedModels, metrics: Metrics) -> list[Route]:
    """Routes of this family."""

    async def create(request: Request) -> Response:
        body = ChatRequest.parse(await read_object(request))
        model = models.resolve(body.model)
        num_top = (body.top_logprobs or 0) if body.logprobs else None
        params = body.sampling(max_tokens=body.max_completion_tokens or body.max_tokens, logprobs=num_top)
        prompt = await run_in_threadpool(_prompt, engine, body)
        job = Job(f"chatcmpl-{uuid.uuid4().hex}", model, [prompt], params, body, models.adapter(model))
        answer = (_ChatStream if body.stream else _ChatAnswer)(engine, metrics, job)
        return await EventStream.open(answer.events()) if body.stream else respond(await answer.whole())

    return [Route("/v1/chat/completions", create, methods=["POST"])]


def _prompt(engine: Engine, body: ChatRequest) -> list[int]:
    """The conversation as token ids, special tokens and all."""
    continued = bool(body.continue_final_message)
    generation_prompt = not continued if body.add_generation_prompt is None else body.add_generation_prompt
    settings = body.chat_template_kwargs or {}
    if clash := _TEMPLATE_OWN & settings.keys():
        name = f"chat_template_kwargs.{min(clash)}"
        raise RequestError(f"{name} is not allowed; there is a parameter for it, or it is not supported.", name)
    return engine.tokenizer.apply_chat_template(
        render(body.messages),
        add_generation_prompt=generation_prompt,
        continue_final_message=continued,
        **settings,
    )


class _ChatAnswer(Answer):
    plain_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    prompt_param = "messages"

    def choices(self, position: int, result: RequestOutput, output: CompletionOutput) -> Iterator[dict[str, Any]]:
        message = {"role": "assistant", "content": output.text, "refusal": None}
        yield self._choice(position, output, "message", message)

    def _choice(self, position: int, output: CompletionOutput, key: str, value: dict[str, Any]) -> dict[str, Any]:
        return {
            "index": self.index(position, output),
            key: value,
            "logprobs": chat_logprobs(output, self._job.params.logprobs or 0, self._engine.tokenizer),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }


class _ChatStream(_ChatAnswer):
    """As a stream every choice opens with its role, so that clients know of it before its first text."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._opened: set[int] = set()

    def choices(self, position: int, result: RequestOutput, output: CompletionOutput) -> Iterator[dict[str, Any]]:
        if output.index not in self._opened:
            self._opened.add(output.index)
            opening = CompletionOutput(output.index)
            yield self._choice(position, opening, "delta", {"role": "assistant", "content": ""})
        if output.text or output.logprobs or output.finish_reason:
            yield self._choice(position, output, "delta", {"content": output.text} if output.text else {})
