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
from jaxserve.request import FinishReason
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.generation import Answer, Job
from jaxserve.server.jsonio import read_object, respond
from jaxserve.server.logprobs import chat_logprobs
from jaxserve.server.messages import render
from jaxserve.server.models import ServedModels
from jaxserve.server.parsers import Call, OutputParser, Piece
from jaxserve.server.protocol import Engine
from jaxserve.server.schema import ChatRequest
from jaxserve.server.sse import EventStream
from jaxserve.server.turns import Reading, Turn, Turns

__all__ = ["routes"]

_TEMPLATE_OWN = frozenset(
    {"add_generation_prompt", "chat_template", "continue_final_message", "messages", "return_dict", "tokenize", "tools"}
)
"""Names that ``chat_template_kwargs`` must leave alone: other parameters decide them."""


def routes(engine: Engine, models: ServedModels, metrics: Metrics, turns: Turns, *, strict: bool) -> list[Route]:
    """Routes of this family; ``strict`` ones refuse parameters that nobody knows."""

    async def create(request: Request) -> Response:
        body = ChatRequest.parse(await read_object(request), strict=strict)
        model = models.resolve(body.model)
        turn = turns.plan(body)
        prompt = await run_in_threadpool(_prompt, engine, body, turn)
        reading = turns.read(turn, prompt)
        job = Job(
            f"chatcmpl-{uuid.uuid4().hex}",
            model,
            [prompt],
            _params(body, reading),
            body,
            turn.structure_field,
            models.adapter(model),
        )
        answer = (_ChatStream if body.stream else _ChatAnswer)(engine, metrics, job, reading)
        if body.stream:
            return await EventStream.open(answer.events(), headers=body.headers)
        return respond(await answer.whole(), headers=body.headers)

    return [Route("/v1/chat/completions", create, methods=["POST"])]


def _params(body: ChatRequest, reading: Reading) -> SamplingParams:
    num_top = (body.top_logprobs or 0) if body.logprobs else None
    kept = {"skip_special_tokens": False} if reading.keep_special else {}
    return body.sampling(
        max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=num_top,
        structured_outputs=reading.structure,
        **kept,
    )


def _prompt(engine: Engine, body: ChatRequest, turn: Turn) -> list[int]:
    """The conversation as token ids, special tokens and all."""
    continued = bool(body.continue_final_message)
    generation_prompt = not continued if body.add_generation_prompt is None else body.add_generation_prompt
    settings = body.chat_template_kwargs or {}
    if clash := _TEMPLATE_OWN & settings.keys():
        name = f"chat_template_kwargs.{min(clash)}"
        raise RequestError(f"{name} is not allowed; there is a parameter for it, or it is not supported.", name)
    messages, options = turn.put(render(body.messages))
    return engine.tokenizer.apply_chat_template(
        messages,
        add_generation_prompt=generation_prompt,
        continue_final_message=continued,
        chat_template=body.chat_template,
        **options,
        **settings,
    )


class _ChatAnswer(Answer):
    plain_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    prompt_param = "messages"

    def __init__(self, engine: Engine, metrics: Metrics, job: Job, reading: Reading) -> None:
        super().__init__(engine, metrics, job)
        self._reading = reading

    def choices(self, position: int, result: RequestOutput, output: CompletionOutput) -> Iterator[dict[str, Any]]:
        parser = self._reading.output_parser()
        piece = parser.push(output.text, last=True)
        only_other = not piece.content and bool(piece.calls or piece.reasoning)
        content = None if only_other else piece.content
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._reading.shows_reasoning:
            message |= _reasoning(piece.reasoning or None)
        if piece.calls:
            message["tool_calls"] = [_call(call, self._reading.new_id()) for call in piece.calls]
        yield self._choice(position, output, "message", message, parser.num_calls)

    def _choice(
        self, position: int, output: CompletionOutput, key: str, value: dict[str, Any], num_calls: int = 0
    ) -> dict[str, Any]:
        called = num_calls and output.finish_reason == FinishReason.STOP
        return {
            "index": self.index(position, output),
            key: value,
            "logprobs": chat_logprobs(output, self._job.params.logprobs or 0, self._engine.tokenizer),
            "finish_reason": "tool_calls" if called else output.finish_reason,
            "stop_reason": output.stop_reason,
        }


class _ChatStream(_ChatAnswer):
    """As a stream every choice opens with its role, so that clients know of it before its first text."""

    def __init__(self, engine: Engine, metrics: Metrics, job: Job, reading: Reading) -> None:
        super().__init__(engine, metrics, job, reading)
        self._parsers: dict[int, OutputParser] = {}

    def choices(self, position: int, result: RequestOutput, output: CompletionOutput) -> Iterator[dict[str, Any]]:
        if output.index not in self._parsers:
            self._parsers[output.index] = self._reading.output_parser()
            opening = CompletionOutput(output.index)
            yield self._choice(position, opening, "delta", {"role": "assistant", "content": ""})
        parser = self._parsers[output.index]
        delta = self._delta(parser.push(output.text, last=output.finish_reason is not None))
        if delta or output.logprobs or output.finish_reason:
            yield self._choice(position, output, "delta", delta, parser.num_calls)

    def _delta(self, piece: Piece) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if piece.reasoning and self._reading.shows_reasoning:
            delta |= _reasoning(piece.reasoning)
        if piece.content:
            delta["content"] = piece.content
        if piece.calls:
            delta["tool_calls"] = [self._part_of_call(call) for call in piece.calls]
        return delta

    def _part_of_call(self, call: Call) -> dict[str, Any]:
        if call.name is None:
            return {"index": call.index, "function": {"arguments": call.arguments}}
        return {"index": call.index, **_call(call, self._reading.new_id())}


def _call(call: Call, call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _reasoning(text: str | None) -> dict[str, Any]:
    """Under the name that vLLM gives it now, and under the older one, which most clients know."""
    return {"reasoning": text, "reasoning_content": text}
