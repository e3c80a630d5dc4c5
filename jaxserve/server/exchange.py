"""One turn of a chat, whatever API asks for it: how it is put to the model, and its answer as it is written.

The chat endpoint, the responses and the messages differ in their words alone. Theirs become a ``ChatRequest``; what the
model writes comes back as events of thoughts, text and calls in their order, the same with and without streaming.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

from starlette.concurrency import run_in_threadpool

from jaxserve.errors import RequestError
from jaxserve.metrics import Metrics
from jaxserve.outputs import CompletionOutput
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.generation import Generation, Job
from jaxserve.server.logprobs import chat_logprobs
from jaxserve.server.messages import render
from jaxserve.server.parsers import Event
from jaxserve.server.protocol import Engine
from jaxserve.server.schema import ChatRequest
from jaxserve.server.turns import Reading, Turn, Turns

__all__ = ["Exchange", "Written", "named_as", "prompt_ids", "put", "truncated"]

_TEMPLATE_OWN = frozenset(
    {"add_generation_prompt", "chat_template", "continue_final_message", "messages", "return_dict", "tokenize", "tools"}
)
"""Names that ``chat_template_kwargs`` must leave alone: other parameters decide them."""


async def put(engine: Engine, turns: Turns, body: ChatRequest, job_id: str, model: str) -> tuple[Job, Reading]:
    """What ``body`` asks of the engine, and how its answers are to be read. RequestError: it cannot be served."""
    turn = turns.plan(body)
    prompt = await run_in_threadpool(prompt_ids, engine, body, turn)
    reading = turns.read(turn, prompt)
    return Job(job_id, model, [prompt], _params(body, reading), body, turn.structure_field), reading


def prompt_ids(engine: Engine, body: ChatRequest, turn: Turn) -> list[int]:
    """The conversation as token ids, special tokens and all."""
    continued = bool(body.continue_final_message)
    generation_prompt = not continued if body.add_generation_prompt is None else body.add_generation_prompt
    settings = body.chat_template_kwargs or {}
    template = body.chat_template or engine.tokenizer.chat_template or ""
    if body.documents is not None:
        if "documents" not in template:
            raise RequestError("documents: the chat template knows none.", "documents")
        settings = {**settings, "documents": body.documents}
    if clash := _TEMPLATE_OWN & settings.keys():
        name = f"chat_template_kwargs.{min(clash)}"
        raise RequestError(f"{name} is not allowed; there is a parameter for it, or it is not supported.", name)
    messages, options = turn.put(render(body.messages))
    ids = engine.tokenizer.apply_chat_template(
        messages,
        add_generation_prompt=generation_prompt,
        continue_final_message=continued,
        chat_template=body.chat_template,
        **options,
        **settings,
    )
    return truncated(ids, body.truncate_prompt_tokens, engine.max_model_len)


def truncated(ids: list[int], most: int | None, max_model_len: int) -> list[int]:
    """The last tokens of a prompt, at most ``most``; -1 is as many as leave room for one more."""
    if most is None:
        return ids
    if most == 0 or most >= max_model_len:
        raise RequestError(
            f"truncate_prompt_tokens must be -1 or from 1 to {max_model_len - 1}, got {most}.", "truncate_prompt_tokens"
        )
    return ids[-(max_model_len - 1 if most == -1 else most) :]


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
        job: tuple[str, str],
        names: Mapping[str, str],
    ) -> Self:
        """Put a chat to the model. ``job`` is the answer's id and the model's name; ``names`` is for ``named_as``."""
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
