"""``GET /debug/requests`` and ``GET /debug/requests/{id}``: what became of each request, and what took its time.

A request is known by its answer's id, by that with the position of a prompt, and by the ``X-Request-Id`` of its HTTP
request. Of an HTTP request with several prompts, figures are sums.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Iterable, Sequence
from itertools import zip_longest
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxserve.live import Entry, Journal, Part, Report
from jaxserve.outputs import RequestOutput
from jaxserve.server.errors import NotFoundError
from jaxserve.server.jsonio import respond
from jaxserve.server.live_events import answer_id
from jaxserve.server.middleware import HTTP_ID
from jaxserve.server.protocol import Engine

__all__ = ["Names", "routes", "with_names"]

_MAX_NAMES = 4000


class Names:
    """Answers' ids by ``X-Request-Id``, the newest 4,000."""

    def __init__(self) -> None:
        self._answers: OrderedDict[str, str] = OrderedDict()

    def note(self, http_id: str, answer: str) -> None:
        """The HTTP request has this answer."""
        self._answers[http_id] = answer
        self._answers.move_to_end(http_id)
        if len(self._answers) > _MAX_NAMES:
            self._answers.popitem(last=False)

    def find(self, http_id: str) -> str | None:
        """The newest answer of HTTP requests with this id."""
        return self._answers.get(http_id)


def with_names(engine: Engine, names: Names) -> Engine:
    """The engine, where ``generate`` notes for which HTTP request it is."""
    return cast(Engine, _Named(engine, names))


class _Named:
    """Everything but ``generate`` is the engine's own."""

    def __init__(self, engine: Engine, names: Names) -> None:
        self._engine = engine
        self._names = names

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(
        self, prompt: str | Sequence[int], params: Any, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        if http_id := HTTP_ID.get():
            self._names.note(http_id, answer_id(request_id))
        return self._engine.generate(prompt, params, request_id, **options)


def routes(engine: Engine, names: Names, model: str) -> list[Route]:
    """Routes of this family; ``model`` is the name that is served."""

    async def listed(request: Request) -> Response:
        journal = engine.live.journal
        running: list[str] = []
        waiting: list[str] = []
        finished: list[str] = []
        for entry in journal.entries.values():
            (finished if entry.has_ended else running if entry.is_running else waiting).append(entry.id)
        finished = [*reversed(finished), *(report.id for report in journal.finished)]
        return respond({"running": _answers(running), "waiting": _answers(waiting), "finished": _answers(finished)})

    async def one(request: Request) -> Response:
        wanted = request.path_params["id"]
        reports = _find(engine.live.journal, wanted)
        if not reports and (answer := names.find(wanted)) is not None:
            reports = _find(engine.live.journal, answer)
        if not reports:
            raise NotFoundError(f"no request {wanted[:128]!r} is known; the newest 1,000 that have ended are.", "id")
        shape = engine.live.shape
        return respond({**_described(reports, model), "block_size": shape.block_size})

    return [Route("/debug/requests", listed), Route("/debug/requests/{id:path}", one)]


def _answers(ids: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(map(answer_id, ids)))


def _find(journal: Journal, wanted: str) -> list[Report]:
    """Reports of one prompt, or of all of an answer, by position; of several of one id the newest."""
    found: dict[str, Entry | Report] = {}
    for known in journal.newest_first():
        if known.id == wanted:
            found = {known.id: known}
            break
        if answer_id(known.id) == wanted:
            found.setdefault(known.id, known)
    ordered = sorted(found, key=lambda id: (len(id), id))
    return [known.report() if isinstance(known := found[id], Entry) else known for id in ordered]


def _described(reports: Sequence[Report], model: str) -> dict[str, Any]:
    first = reports[0]
    parts = [part for report in reports for part in report.parts]
    ended = all(report.parts and all(part.ended_at for part in report.parts) for report in reports)
    of_prompts = [report.parts[0] for report in reports if report.parts]
    answer = {
        "id": answer_id(first.id),
        "state": _state(parts, ended=ended),
        "finish_reason": parts[0].finish_reason if ended else None,
        "model": model,
        "adapter": first.adapter,
        "arrived": round(min(report.arrived for report in reports), 3),
        "times": _times(reports, parts, ended=ended),
        # The completions of a prompt share it.
        "prompt_tokens": sum(part.prompt_tokens for part in of_prompts),
        "cached_tokens": sum(part.cached_tokens for part in of_prompts),
        "misses": _misses(of_prompts),
        **_work(parts),
        "block_table": list(next((part.blocks for part in parts if part.blocks), ())),
    }
    answer["completions"] = [_completion(report, part) for report in reports for part in report.parts]
    if len(parts) < 2:
        answer["completions"] = []
    return answer


def _state(parts: Sequence[Part], *, ended: bool) -> str:
    if ended:
        return "finished"
    states = {part.state for part in parts}
    return next((state for state in ("running", "waiting") if state in states), "finished" if parts else "preparing")


def _completion(report: Report, part: Part) -> dict[str, Any]:
    """One of several completions."""
    return {
        "id": report.id,
        "state": part.state,
        "finish_reason": part.finish_reason,
        "prompt_tokens": part.prompt_tokens,
        "cached_tokens": part.cached_tokens,
        "misses": _misses([part]),
        "forked": part.forked,
        "times": _times([report], [part], ended=bool(part.ended_at)),
        **_work([part]),
        "block_table": list(part.blocks),
    }


def _work(parts: Sequence[Part]) -> dict[str, Any]:
    by_position = zip_longest(*(part.drafts.accepted_by_position for part in parts), fillvalue=0)
    return {
        "output_tokens": sum(part.output_tokens for part in parts),
        "chunks": [tokens for part in parts for tokens in part.chunks],
        "preemptions": sum(part.preemptions for part in parts),
        "recomputed_tokens": sum(part.recomputed_tokens for part in parts),
        "drafts": {
            "proposed": sum(part.drafts.num_draft_tokens for part in parts),
            "accepted": sum(part.drafts.num_accepted_tokens for part in parts),
            "accepted_by_position": [sum(counts) for counts in by_position],
        },
    }


def _misses(parts: Sequence[Part]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for part in parts:
        if part.miss:
            found[part.miss] += part.prompt_tokens - part.cached_tokens
    return dict(found)


def _times(reports: Sequence[Report], parts: Sequence[Part], *, ended: bool) -> dict[str, float]:
    """Seconds in each phase, the one that goes on up to now; they add up to the total."""
    end = max((part.ended_at for part in parts), default=0.0) if ended else time.monotonic()
    begins = [min(report.opened_at for report in reports)]
    for when in ("arrived_at", "scheduled_at", "first_token_at"):
        begins.append(min((at for part in parts if (at := getattr(part, when))), default=end))
    phases = zip(("preparing", "queue", "prefill", "decode"), begins, (*begins[1:], end), strict=True)
    return {**{name: _seconds(then - since) for name, since, then in phases}, "total": _seconds(end - begins[0])}


def _seconds(value: float) -> float:
    return round(max(0.0, value), 6)
