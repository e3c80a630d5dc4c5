"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxserve.metrics import Metrics
from jaxserve.outputs import CompletionOutput, RequestOutput
from jaxserve.request import FinishReason
from jaxserve.server.bodies import read_chat, read_large_chat
from jaxserve.server.exchange import put
from jaxserve.server.generation import Answer, Job
from jaxserve.server.intake import Intake
from jaxserve.server.jsonio import respond
from jaxserve.server.logprobs import chat_logprobs, prompt_logprobs
from jaxserve.server.models import ServedModels
from jaxserve.server.parsers import Call, OutputParser, Piece
from jaxserve.server.protocol import Engine
from jaxserve.server.sse import EventStream
from jaxserve.server.turns import Reading

__all__ = ["routes"]


def routes(engine: Engine, models: ServedModels, metrics: Metrics, intake: Intake) -> list[Route]:
    """Routes of this family."""
    turns = intake.rules.turns

    async def create(request: Request) -> Response:
        body = await intake.read(request, read_chat, read_large_chat)
        model = models.resolve(body.model)
        job, reading = await put(engine, turns, body, body.new_id("chatcmpl"), (model, models.adapter(model)))
        answer = (_ChatStream if body.stream else _ChatAnswer)(engine, metrics, job, reading)
        if body.stream:
            return EventStream(answer.events(), body.headers, late_headers=lambda: answer.headers)
        whole = await answer.whole()
        return respond(whole, headers={**body.headers, **answer.headers})

    return [Route("/v1/chat/completions", create, methods=["POST"])]


class _ChatAnswer(Answer):
    plain_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    prompt_param = "messages"

    def __init__(self, engine: Engine, metrics: Metrics, job: Job, reading: Reading) -> None:
        super().__init__(engine, metrics, job)
        self._reading = reading

    def choices(self, position: int, result: RequestOutput, output: CompletionOutput) -> Iterator[dict[str, Any]]:
        self._note(result)
        if result.prompt_logprobs is not None:
            self.extras["prompt_logprobs"] = prompt_logprobs(result.prompt_logprobs)
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

    def _note(self, result: RequestOutput) -> None:
        """The first result of the one prompt."""
        if self.body.return_token_ids:
            self.extras["prompt_token_ids"] = result.prompt_token_ids

    def _choice(
        self, position: int, output: CompletionOutput, key: str, value: dict[str, Any], num_calls: int = 0
    ) -> dict[str, Any]:
        called = num_calls and output.finish_reason == FinishReason.STOP
        return {
            "index": self.index(position, output),
            key: value,
            "logprobs": chat_logprobs(
                output,
                self._job.params.logprobs or 0,
                self._engine.tokenizer,
                as_ids=bool(self.body.return_tokens_as_token_ids),
            ),
            "finish_reason": "tool_calls" if called else output.finish_reason,
            "stop_reason": output.stop_reason,
            **({"token_ids": output.token_ids} if self.body.return_token_ids else {}),
        }


class _ChatStream(_ChatAnswer):
    """As a stream every choice opens with its role, so that clients know of it before its first text."""

    def __init__(self, engine: Engine, metrics: Metrics, job: Job, reading: Reading) -> None:
        super().__init__(engine, metrics, job, reading)
        self._parsers: dict[int, OutputParser] = {}

    def choices(self, position: int, result: RequestOutput, output: CompletionOutput) -> Iterator[dict[str, Any]]:
        if not self._parsers:
            self._note(result)
        if output.index not in self._parsers:
            self._parsers[output.index] = self._reading.output_parser()
            opening = CompletionOutput(output.index)
            yield self._choice(position, opening, "delta", {"role": "assistant", "content": ""})
        parser = self._parsers[output.index]
        delta = self._delta(parser.push(output.text, last=output.finish_reason is not None))
        if delta or output.logprobs or output.finish_reason or (self.body.return_token_ids and output.token_ids):
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
