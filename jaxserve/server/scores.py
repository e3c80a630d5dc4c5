"""``POST /v1/score`` and ``POST /v1/rerank``: how well texts fit each other, by log probability.

The score of a pair is the mean log probability of the second text's tokens after the first. Documents are ranked by how
likely the query is after each of them (query likelihood; Ponte and Croft 1998, with language models as in Sachan et al.
2022, arXiv:2204.07496); their relevance is the probability per token, from 0 to 1.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxserve.engine.reading import SCORING, joined, mean_logprob, pairs
from jaxserve.errors import RequestError
from jaxserve.metrics import Metrics
from jaxserve.server.bodies import Rules, packed_prompt
from jaxserve.server.exchange import named_as
from jaxserve.server.forms import one_or_many
from jaxserve.server.generation import Generation, Job, Usage
from jaxserve.server.intake import Intake
from jaxserve.server.jsonio import dumps, parse_object, respond
from jaxserve.server.models import ServedModels
from jaxserve.server.protocol import Engine
from jaxserve.server.schema import MAX_PROMPTS, Scheduled

__all__ = ["RerankRequest", "ScoreRequest", "routes"]

_BETWEEN = "\n\n"
"""Stands between a document and the query."""

_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "activation": (),
    "apply_softmax": (False,),
    "item_first": (False,),
    "label_token_ids": (),
    "max_tokens_per_doc": (0,),
    "mm_processor_kwargs": (),
    "use_activation": (False,),
}


_Texts = Annotated[list[str], BeforeValidator(one_or_many), Field(min_length=1, max_length=MAX_PROMPTS)]


class ScoreRequest(Scheduled):
    """Body of ``POST /v1/score``."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = _UNSUPPORTED

    text_1: _Texts
    text_2: _Texts


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    text: str


def _document(value: Any) -> Any:
    return {"text": value} if isinstance(value, str) else value


class RerankRequest(Scheduled):
    """Body of ``POST /v1/rerank``."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = _UNSUPPORTED

    query: str = Field(min_length=1)
    documents: list[Annotated[_Document, BeforeValidator(_document)]] = Field(min_length=1, max_length=MAX_PROMPTS)
    top_n: int | None = Field(None, ge=0)
    return_documents: bool | None = None


_Body = TypeVar("_Body", bound=Scheduled, covariant=True)


@dataclass(frozen=True)
class _Asked(Generic[_Body]):
    """What is left of a request.

    Attributes:
        body: its parameters without the texts.
        pairs: token ids, and how many of them are the first text's.
        documents: those of a ranking, as JSON.
    """

    body: _Body
    pairs: list[tuple[array[int], int]]
    documents: list[bytes] = field(default_factory=list)


def _read_scores(rules: Rules, data: bytes) -> _Asked[ScoreRequest]:
    body = ScoreRequest.parse(_renamed(parse_object(data)), strict=rules.config.strict_params)
    asked = _joined(rules, body, pairs(body.text_1, body.text_2))
    return _Asked(body.model_copy(update={"text_1": [], "text_2": []}), asked)


def _read_ranking(rules: Rules, data: bytes) -> _Asked[RerankRequest]:
    body = RerankRequest.parse(parse_object(data), strict=rules.config.strict_params)
    with named_as({"text_1": "documents", "text_2": "documents"}):
        asked = _joined(rules, body, [(document.text + _BETWEEN, body.query) for document in body.documents])
    shown = [dumps({"text": document.text}) for document in body.documents if body.return_documents is not False]
    return _Asked(body.model_copy(update={"query": "", "documents": []}), asked, shown)


def _joined(rules: Rules, body: Scheduled, texts: Sequence[tuple[str, str]]) -> list[tuple[array[int], int]]:
    if body.truncate_prompt_tokens is not None:
        raise RequestError("truncate_prompt_tokens is not supported for pairs of texts.", "truncate_prompt_tokens")
    asked = []
    for pair in texts:
        ids, num_first = joined(rules.tokenizer, pair, rules.max_model_len)
        asked.append((packed_prompt(rules, ids, "text_2"), num_first))
    return asked


class _Scorer:
    """Scores pairs for one request."""

    def __init__(self, engine: Engine, models: ServedModels, metrics: Metrics) -> None:
        self._engine = engine
        self._models = models
        self._metrics = metrics

    async def scores(self, job_id: str, model: str, asked: _Asked[Scheduled]) -> tuple[list[float], Usage]:
        """The score of each pair, and what it cost."""
        prompts = [ids for ids, _ in asked.pairs]
        job = Job(job_id, model, prompts, SCORING, asked.body, adapter=self._models.adapter(model))
        reading = Generation(self._engine, self._metrics, job, prompt_param="text_2")
        scores = [0.0] * len(prompts)
        async with aclosing(reading.outputs(stream=False)) as outputs:
            async for position, result in outputs:
                reading.usage.add(position, result)
                scores[position] = mean_logprob(result, asked.pairs[position][1])
        return scores, reading.usage


def routes(engine: Engine, models: ServedModels, metrics: Metrics, intake: Intake) -> list[Route]:
    """Routes of this family."""
    scorer = _Scorer(engine, models, metrics)

    async def score(request: Request) -> Response:
        asked = await intake.compute(request, _read_scores)
        model, job_id = models.resolve(asked.body.model), asked.body.new_id("score")
        scores, usage = await scorer.scores(job_id, model, asked)
        answer = {
            "id": job_id,
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "data": [{"index": i, "object": "score", "score": found} for i, found in enumerate(scores)],
            "usage": _shown(usage),
        }
        return respond(answer, headers=asked.body.headers)

    async def rerank(request: Request) -> Response:
        asked = await intake.compute(request, _read_ranking)
        body = asked.body
        model, job_id = models.resolve(body.model), body.new_id("rerank")
        with named_as({"text_1": "documents", "text_2": "documents"}):
            scores, usage = await scorer.scores(job_id, model, asked)
        results = []
        for index in sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]:
            result = dumps({"index": index, "relevance_score": math.exp(scores[index])})
            document = b',"document":' + asked.documents[index] if asked.documents else b""
            results.append(result[:-1] + document + b"}")
        answer = dumps({"id": job_id, "model": model, "usage": _shown(usage)})
        text = answer[:-1] + b',"results":[' + b",".join(results) + b"]}"
        return Response(text, headers=body.headers, media_type="application/json")

    scoring = [Route(path, score, methods=["POST"]) for path in ("/v1/score", "/score")]
    return [*scoring, *(Route(path, rerank, methods=["POST"]) for path in ("/v1/rerank", "/v2/rerank", "/rerank"))]


def _renamed(body: dict[str, Any]) -> dict[str, Any]:
    """The names that vLLM and SGLang have for the two texts, as one."""
    names = {"data_1": "text_1", "data_2": "text_2", "query": "text_1", "queries": "text_1", "items": "text_2"}
    names["documents"] = "text_2"
    renamed: dict[str, Any] = {}
    for name, value in body.items():
        if (own := names.get(name, name)) in renamed:
            raise RequestError(f"{name} cannot be given together with another name for {own}.", name)
        renamed[own] = value
    return renamed


def _shown(usage: Usage) -> dict[str, Any]:
    num_tokens = usage.shown()["prompt_tokens"]
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
