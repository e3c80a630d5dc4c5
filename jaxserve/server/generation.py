"""From prompts to the objects of an answer: what the two generating endpoints share.

A plain answer and a stream are made by the same code: the plain one is the stream's single piece.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from jaxserve.errors import RequestError
from jaxserve.metrics import Metrics
from jaxserve.outputs import CompletionOutput, RequestMetrics, RequestOutput, SpeculationStats
from jaxserve.request import FinishReason
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.errors import AbortedError, GenerationError
from jaxserve.server.protocol import Engine
from jaxserve.server.schema import GenerationRequest, Scheduled, StreamOptions
from jaxserve.server.structure import renamed

__all__ = ["Answer", "Generation", "Job", "Usage"]

Outputs = AsyncGenerator[tuple[int, RequestOutput], None]


@dataclass(frozen=True)
class Job:
    """What one HTTP request asks of the engine.

    Attributes:
        id: id of the answer, and the stem of its engine requests' ids.
        model: the name to answer with.
        prompts: texts or token ids; each becomes one engine request.
        params: sampling parameters of all of them.
        body: the request as it came.
        structure_field: the field of the request that asks for the output's form.
        adapter: name of the adapter to generate with, None for the base model.
        pooling: what is made of the prompts' hidden states: "mean", "last", or "" for nothing.
    """

    id: str
    model: str
    prompts: Sequence[str | Sequence[int]]
    params: SamplingParams
    body: Scheduled
    structure_field: str = "structured_outputs"
    adapter: str | None = None
    pooling: str = ""


@dataclass
class Usage:
    """Token counts of an answer so far; those of drafts are shown where the engine ``speculates``."""

    speculates: bool = False
    prompt: dict[int, int] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    drafts: dict[int, SpeculationStats] = field(default_factory=dict)
    times: dict[int, RequestMetrics] = field(default_factory=dict)
    completion: int = 0

    def add(self, position: int, output: RequestOutput) -> None:
        """Count ``output`` of the prompt at ``position``."""
        self.prompt[position] = len(output.prompt_token_ids)
        self.cached[position] = output.num_cached_tokens
        self.drafts[position] = output.metrics.speculation
        self.times[position] = output.metrics
        self.completion += sum(len(completion.token_ids) for completion in output.outputs)

    def shown(self) -> dict[str, Any]:
        """The ``usage`` object."""
        prompt = sum(self.prompt.values())
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": self.completion,
            "total_tokens": prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
        }
        if self.speculates:
            by_position = zip_longest(*(drafts.accepted_by_position for drafts in self.drafts.values()), fillvalue=0)
            accepted = sum(drafts.num_accepted_tokens for drafts in self.drafts.values())
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": sum(d.num_draft_tokens for d in self.drafts.values()) - accepted,
                "accepted_prediction_tokens_per_position": [sum(counts) for counts in by_position],
            }
        return usage

    def measured(self) -> list[dict[str, Any]]:
        """What each prompt took, in seconds: the ``metrics`` of an answer that was asked to include them."""
        return [
            {
                "time_in_queue": max(0.0, times.scheduled_at - times.arrived_at),
                "prefill_time": max(0.0, times.first_token_at - times.scheduled_at),
                "time_to_first_token": max(0.0, times.first_token_at - times.arrived_at),
                "decode_time": max(0.0, times.finished_at - times.first_token_at),
                "e2e_latency": max(0.0, times.finished_at - times.arrived_at),
                "num_preemptions": times.num_preemptions,
            }
            for _, times in sorted(self.times.items())
        ]


class Generation:
    """The work on one HTTP request: what it asks the engine, what comes back, and what it cost.

    Attributes:
        prompt_param: the parameter that holds the prompt, named when the engine refuses it.
        usage: token counts so far.
    """

    prompt_param: str = "prompt"

    def __init__(self, engine: Engine, metrics: Metrics, job: Job, *, prompt_param: str | None = None) -> None:
        self.prompt_param = prompt_param or self.prompt_param
        self._engine = engine
        self._metrics = metrics
        self._job = job
        self.usage = Usage(engine.config.speculative.is_asked)

    def outputs(self, *, stream: bool) -> Outputs:
        """Outputs of all prompts as they come, or each prompt's finished one, with the prompt's position."""
        if self._job.body.priority and self._engine.config.scheduler.scheduling_policy != "priority":
            raise RequestError("priority needs a server with --scheduling-policy priority.", "priority")
        ids = [f"{self._job.id}-{position}" for position in range(len(self._job.prompts))]
        if self._job.body.request_id and not set(self._engine.open_requests()).isdisjoint(ids):
            raise RequestError("request_id is that of a request which is being answered.", "request_id")
        return _merge([self._one(position, request_id, stream) for position, request_id in enumerate(ids)])

    async def _one(self, position: int, request_id: str, stream: bool) -> AsyncGenerator[RequestOutput, None]:
        job = self._job
        generated = self._engine.generate(
            job.prompts[position],
            job.params,
            request_id,
            priority=job.body.priority or 0,
            cache_salt=job.body.cache_salt,
            adapter=job.adapter,
            stream=stream,
            pooling=job.pooling,
        )
        with self._metrics.track(job.params) as tracker:
            async with aclosing(generated) as results:
                try:
                    async for result in results:
                        tracker.output(result)
                        _check_ends(result)
                        yield result
                except RequestError as error:
                    if error.param == "prompt":
                        raise RequestError(str(error), self.prompt_param) from error
                    raise renamed(error, job.structure_field) from error


class Answer(Generation, ABC):
    """One answer in the making, of choices. Subclasses say how these look.

    Attributes:
        plain_object, chunk_object: the value of ``object`` in a plain answer, and in the chunks of a stream.
        extras: what else the plain answer holds, or the next chunk.
    """

    plain_object: str
    chunk_object: str

    def __init__(self, engine: Engine, metrics: Metrics, job: Job) -> None:
        super().__init__(engine, metrics, job)
        self._created = int(time.time())
        self.extras: dict[str, Any] = {}

    @property
    def body(self) -> GenerationRequest:
        """The request as it came."""
        assert isinstance(self._job.body, GenerationRequest), "only such requests have choices"
        return self._job.body

    @abstractmethod
    def choices(self, position: int, result: RequestOutput, output: CompletionOutput) -> Iterator[dict[str, Any]]:
        """The objects that tell of ``output`` of the prompt at ``position``: one, or with streams none or more."""

    def picked(self, result: RequestOutput) -> Sequence[CompletionOutput]:
        """The completions of a finished prompt that are answered with: all of them."""
        return result.outputs

    async def whole(self) -> dict[str, Any]:
        """The plain answer."""
        choices: list[dict[str, Any]] = []
        async with aclosing(self.outputs(stream=False)) as outputs:
            async for position, result in outputs:
                self.usage.add(position, result)
                for output in self.picked(result):
                    choices.extend(self.choices(position, result, output))
        choices.sort(key=lambda choice: int(choice["index"]))
        return {
            **self._envelope(self.plain_object),
            "choices": choices,
            "usage": self.usage.shown(),
            **self._measured(),
            **self.extras,
        }

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of the stream."""
        options = self.body.stream_options or StreamOptions()
        envelope = self._envelope(self.chunk_object)
        async with aclosing(self.outputs(stream=True)) as outputs:
            async for position, result in outputs:
                self.usage.add(position, result)
                for output in result.outputs:
                    for choice in self.choices(position, result, output):
                        chunk = {**envelope, "choices": [choice], **self.extras}
                        self.extras = {}
                        if options.continuous_usage_stats:
                            chunk["usage"] = self.usage.shown()
                        elif options.include_usage:
                            chunk["usage"] = None
                        yield chunk
        last = {"usage": self.usage.shown()} if options.include_usage else {}
        if last := last | self._measured():
            yield {**envelope, "choices": [], **last}

    def _measured(self) -> dict[str, Any]:
        return {"metrics": self.usage.measured()} if self.body.include_metrics else {}

    @property
    def headers(self) -> dict[str, str]:
        """Once it has begun, what it tells of itself: how many tokens were left to it, if fewer than asked for."""
        asked, prompts = self._job.params.max_tokens, self.usage.prompt.values()
        left = self._engine.max_model_len - max(prompts, default=0)
        return {"x-jaxserve-max-tokens": str(left)} if prompts and asked is not None and asked > left else {}

    def index(self, position: int, output: CompletionOutput) -> int:
        """The number of a choice among those of all prompts."""
        return position * self.body.num_choices + output.index

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {"id": self._job.id, "object": kind, "created": self._created, "model": self._job.model}


def _check_ends(result: RequestOutput) -> None:
    """An answer that the engine did not finish is an error, not a short answer."""
    ends = {output.finish_reason: output for output in result.outputs}
    if (failed := ends.get(FinishReason.ERROR)) is not None:
        why = "." if failed.error is None else f": {failed.error}"
        raise GenerationError(f"the engine failed to generate this answer{why}")
    if FinishReason.ABORT in ends:
        raise AbortedError("the request was aborted by the server, which may be shutting down.")


async def _merge(streams: Sequence[AsyncGenerator[RequestOutput, None]]) -> Outputs:
    """Items of all streams as they come, each with its stream's number. If one fails, or this is closed, all are."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for output in only:
                yield 0, output
        return
    inbox: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue(maxsize=len(streams))

    async def forward(number: int, stream: AsyncGenerator[RequestOutput, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    await inbox.put((number, item))
            await inbox.put((number, None))
        except Exception as error:
            await inbox.put((number, error))

    tasks = [asyncio.create_task(forward(number, stream)) for number, stream in enumerate(streams)]
    try:
        num_left = len(tasks)
        while num_left:
            number, item = await inbox.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_left -= 1
            else:
                yield number, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
