"""One turn of a chat, whatever API asks for it: how it is put to the model, and its answer as it is written.

The chat endpoint, the responses and the messages differ in their words alone. Theirs become a ``ChatRequest``; what the
model writes comes back as events of thoughts, text and calls in their order, the same with and without streaming.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

from jaxserve.errors import RequestError
from jaxserve.metrics import Metrics
from jaxserve.outputs import CompletionOutput
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.generation import Generation, Job
from jaxserve.server.logprobs import chat_logprobs
from jaxserve.server.parsers import Event
from jaxserve.server.prompts import prompt_of
from jaxserve.server.protocol import Engine
from jaxserve.server.schema import ChatRequest
from jaxserve.server.turns import Reading, Turns

__all__ = ["Exchange", "Written", "named_as", "put"]


async def put(
    engine: Engine, turns: Turns, body: ChatRequest, job_id: str, model: tuple[str, str | None]
) -> tuple[Job, Reading]:
    """What ``body`` asks of the engine, and how its answers are to be read. RequestError: it cannot be served.

    ``model`` is the name to answer with, and that of the adapter to generate with.
    """
    turn = turns.plan(body)
    prompt = await prompt_of(engine.tokenizer, body, turn, engine.max_model_len)
    reading = turns.read(turn, prompt)
    name, adapter = model
    return Job(job_id, name, [prompt], _params(body, reading), body, turn.structure_field, adapter), reading


def _params(body: ChatRequest, reading: Reading) -> SamplingParams:
    num_top = (body.top_logprobs or 0) if body.logprobs else None
    kept = {"skip_special_tokens": False} if reading.keep_special else {}
    return body.sampling(
        max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=num_top,
        structured_outputs=reading.structure,
        **kept,
    )


@contextmanager
def named_as(names: Mapping[str, str]) -> Iterator[None]:
    """Errors about parameters of a ``ChatRequest`` become errors about those of the API that it was made from."""
    try:
        yield
    except RequestError as error:
        if error.param is None or (own := names.get(error.param.partition(".")[0])) is None:
            raise
        raise RequestError(str(error).replace(error.param, own, 1), own) from None


@dataclass(frozen=True)
class Written:
    """What is new in an answer: its events, and the tokens that they came with."""

    events: list[Event]
    output: CompletionOutput


class Exchange(Generation):
    """The one answer to one chat, as it is written."""

    def __init__(self, engine: Engine, metrics: Metrics, job: Job, reading: Reading, names: Mapping[str, str]) -> None:
        job = replace(job, structure_field=names.get(job.structure_field, job.structure_field))
        super().__init__(engine, metrics, job, prompt_param=names.get("messages", "messages"))
        self.id = job.id
        self.model = job.model
        self.reading = reading

    @classmethod
    async def open(
        cls,
        engine: Engine,
        metrics: Metrics,
        turns: Turns,
        body: ChatRequest,
        job: tuple[str, tuple[str, str | None]],
        names: Mapping[str, str],
    ) -> Self:
        """Put a chat to the model. ``job`` is the answer's id and the model; see ``put`` and ``named_as``."""
        with named_as(names):
            return cls(engine, metrics, *await put(engine, turns, body, *job), names)

    def num_tokens(self, text: str) -> int:
        """Tokens of a part of the answer."""
        return len(self._engine.tokenizer.encode(text, add_special_tokens=False)) if text else 0

    def logprobs(self, output: CompletionOutput) -> list[dict[str, Any]]:
        """Log probabilities of the tokens of a piece, none if they were not asked."""
        shaped = chat_logprobs(output, self._job.params.logprobs or 0, self._engine.tokenizer)
        return shaped["content"] if shaped is not None else []

    async def written(self, *, stream: bool) -> AsyncGenerator[Written, None]:
        """The answer in its pieces, or in one; the last one's output has a finish reason."""
        parser, spaces = self.reading.output_parser(), _Spaces()
        async with aclosing(self.outputs(stream=stream)) as outputs:
            async for position, result in outputs:
                self.usage.add(position, result)
                (output,) = result.outputs
                last = output.finish_reason is not None
                events = list(spaces.settle(parser.read(output.text, last=last), last=last))
                if not self.reading.shows_reasoning:
                    events = [event for event in events if event.kind != "reasoning"]
                yield Written(events, output)


class _Spaces:
    """Whitespace that opens a text is text only if more follows: between thoughts and calls it belongs to nothing."""

    def __init__(self) -> None:
        self._held = ""
        self._inside = False
        self._empty = True

    def settle(self, events: Iterable[Event], *, last: bool) -> Iterable[Event]:
        for event in events:
            if event.kind != "content":
                self._held, self._inside, self._empty = "", False, False
                yield event
                continue
            text = self._held + event.text
            self._inside = self._inside or not text.isspace()
            self._held = "" if self._inside else text
            if self._inside:
                self._empty = False
                yield Event("content", text)
        if last and self._empty and self._held:
            yield Event("content", self._held)
