"""``POST /v1/embeddings``: hidden states of any decoder, as vectors."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any, ClassVar, Literal

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxserve.engine.reading import EMBEDDING, check_dimensions, shaped
from jaxserve.metrics import Metrics
from jaxserve.outputs import RequestOutput
from jaxserve.server.bodies import Rules, check_rest, packed_prompt
from jaxserve.server.generation import Generation, Job
from jaxserve.server.intake import Intake
from jaxserve.server.jsonio import dumps, parse_object
from jaxserve.server.models import ServedModels
from jaxserve.server.prompts import truncated
from jaxserve.server.protocol import Engine
from jaxserve.server.schema import Prompts, Scheduled

__all__ = ["EmbeddingRequest", "routes"]


class EmbeddingRequest(Scheduled):
    """Body of ``POST /v1/embeddings``."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "add_special_tokens": (True,),
        "messages": (),
    }

    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    pooling: Literal["last", "mean"] | None = None
    normalize: bool | None = None


def routes(engine: Engine, models: ServedModels, metrics: Metrics, intake: Intake) -> list[Route]:
    """Routes of this family."""
    pooling = intake.rules.config.pooling

    async def create(request: Request) -> Response:
        body = await intake.read(request, _read, _read_large)
        model = models.resolve(body.model)
        check_dimensions(body.dimensions, engine.hidden_size)
        job_id = body.new_id("embd")
        prompts = await run_in_threadpool(_prompts, intake.rules, body)
        job = Job(
            job_id,
            model,
            prompts,
            EMBEDDING,
            body,
            adapter=models.adapter(model),
            pooling=body.pooling or pooling,
        )
        reading = Generation(engine, metrics, job, prompt_param="input")
        items = [b""] * len(prompts)
        async with aclosing(reading.outputs(stream=False)) as outputs:
            async for position, result in outputs:
                reading.usage.add(position, result)
                # One by one, as they come: millions of numbers at once would stop all others.
                item = {"object": "embedding", "index": position, "embedding": _shown(result, body)}
                items[position] = dumps(item)
        num_tokens = reading.usage.shown()["prompt_tokens"]
        answer = {
            "id": job_id,
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
        text = dumps(answer)[:-1] + b',"data":[' + b",".join(items) + b"]}"
        return Response(text, headers=body.headers, media_type="application/json")

    return [Route("/v1/embeddings", create, methods=["POST"])]


def _read(rules: Rules, data: bytes) -> EmbeddingRequest:
    return EmbeddingRequest.parse(parse_object(data), strict=rules.config.strict_params)


def _read_large(rules: Rules, data: bytes) -> EmbeddingRequest:
    body = _read(rules, data)
    check_rest(body.model_copy(update={"input": []}))
    prompts = [packed_prompt(rules, prompt, "input") for prompt in _prompts(rules, body)]
    return body.model_copy(update={"input": prompts, "truncate_prompt_tokens": None})


def _prompts(rules: Rules, body: EmbeddingRequest) -> Sequence[str | Sequence[int]]:
    if body.truncate_prompt_tokens is None:
        return body.input
    ids = (rules.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in body.input)
    return [truncated(prompt, body.truncate_prompt_tokens, rules.max_model_len) for prompt in ids]


def _shown(result: RequestOutput, body: EmbeddingRequest) -> list[float] | str:
    embedding = shaped(result, body.dimensions, normalize=body.normalize is not False)
    if body.encoding_format == "base64":
        return base64.b64encode(embedding.astype("<f4").tobytes()).decode("ascii")
    numbers: list[float] = embedding.tolist()
    return numbers
