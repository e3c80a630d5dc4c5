"""A stand-in for an engine that is looked at: the page, and a pool of any size that requests take, share and leave.

It speaks what ``GET /debug/live`` and ``/debug/requests`` speak, so that the page can be tested with 100,000 blocks,
and with streams that break, which no tiny engine offers. Nothing in it is random.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from jaxserve.server import ui

__all__ = ["Feed"]

_BLOCK_SIZE = 16
_SHARED = 12


def _encoded(values: NDArray[Any], dtype: str) -> str:
    return base64.b64encode(values.astype(dtype).tobytes()).decode()


@dataclass
class _Request:
    key: int
    prompt: int
    wanted: int
    blocks: list[int] = field(default_factory=list)
    output: int = 0

    @property
    def id(self) -> str:
        return f"cmpl-{self.key:06d}<b>"

    @property
    def adapter(self) -> str | None:
        return ("sql", None, "legal")[self.key % 3]


class Feed:
    """A pool of ``num_blocks`` and up to ``max_running`` requests in it.

    Attributes:
        is_idle: no new requests start; those that run end.
        is_broken: streams end at once.
        num_watchers: streams that are open.
        intervals: what each stream was opened with, in milliseconds.
    """

    def __init__(self, num_blocks: int = 2048, max_running: int = 12) -> None:
        self.owners = np.zeros(num_blocks, np.uint16)
        self.refs = np.zeros(num_blocks, np.uint8)
        self.is_idle = self.is_broken = False
        self.num_watchers = 0
        self.intervals: list[int] = []
        self._num_blocks = num_blocks
        self._most = max_running
        self._free = deque(range(num_blocks))
        self._running: list[_Request] = []
        self._finished: deque[_Request] = deque(maxlen=50)
        self._next = 2
        self._tick = 0
        self._totals = {"prompt": 0, "generated": 0, "hits": 0}

    def app(self) -> Starlette:
        """The page and what it asks for."""
        return Starlette(
            routes=[
                *ui.routes(),
                Route("/v1/models", self._models),
                Route("/debug/live", self._live),
                Route("/debug/requests", self._requests),
                Route("/debug/requests/{id}", self._request),
            ]
        )

    def step(self) -> list[list[Any]]:
        """Let all requests go on by some tokens; the steps that this took."""
        self._tick += 1
        steps = []
        if not self.is_idle and len(self._running) < self._most and self._tick % 2:
            steps.append(self._start())
        for request in list(self._running):
            request.output += 8
            self._grow(request)
            if request.output >= request.wanted:
                self._end(request)
        rows = len(self._running)
        if rows:
            self._totals["generated"] += 8 * rows
            size = 1 << (rows - 1).bit_length()
            for i in range(8):
                verify = 4 * rows if self._tick % 5 == 0 else 0
                kind = "verify" if verify else "decode"
                seconds = 0.004 + 0.0002 * rows + 0.001 * (i % 3)
                steps.append([self._tick / 4, seconds, kind, 0, rows, verify, size - rows, rows])
        return steps

    def _start(self) -> list[Any]:
        key, self._next = self._next, self._next + 1
        largest = self._num_blocks * _BLOCK_SIZE // (2 * self._most)
        request = _Request(key, prompt=largest // 2 + (key * 7919) % (largest // 2), wanted=80 + (key * 31) % 160)
        if self._running:
            request.blocks = self._running[0].blocks[: min(_SHARED, len(self._running[0].blocks))]
            self.refs[request.blocks] += 1
        cached = len(request.blocks) * _BLOCK_SIZE
        self._totals["prompt"] += request.prompt
        self._totals["hits"] += cached
        self._running.append(request)
        self._grow(request)
        tokens = min(request.prompt - cached, 2048)
        return [self._tick / 4, 0.03, "mixed", tokens, len(self._running), 0, 2048 - tokens, len(self._running)]

    def _grow(self, request: _Request) -> None:
        while len(request.blocks) * _BLOCK_SIZE < request.prompt + request.output and self._free:
            block = self._free.popleft()
            request.blocks.append(block)
            self.owners[block], self.refs[block] = request.key, 1

    def _end(self, request: _Request) -> None:
        self._running.remove(request)
        self._finished.appendleft(request)
        for block in request.blocks:
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self.owners[block] = 1
                self._free.append(block)
            elif self.owners[block] == request.key:
                self.owners[block] = next(other.key for other in self._running if block in other.blocks)

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "stand-in", "object": "model"}]})

    async def _live(self, request: Request) -> Response:
        self.intervals.append(int(request.query_params["interval"]))
        # Ten times as fast as it says: a test need not wait for what it looks at.
        return StreamingResponse(self._events(self.intervals[-1] / 10_000), media_type="text/event-stream")

    async def _events(self, interval: float) -> AsyncIterator[str]:
        self.num_watchers += 1
        try:
            owners, refs = self.owners.copy(), self.refs.copy()
            yield f"event: start\ndata: {json.dumps(self.start_event())}\n\n"
            while not self.is_broken:
                steps = self.step()
                changed = np.flatnonzero((owners != self.owners) | (refs != self.refs))
                yield f"event: state\ndata: {json.dumps(self.state_event(changed, steps))}\n\n"
                owners, refs = self.owners.copy(), self.refs.copy()
                await asyncio.sleep(interval)
        finally:
            self.num_watchers -= 1

    def start_event(self) -> dict[str, Any]:
        """The stream's first event."""
        return {
            "model": "stand-in",
            "block_size": _BLOCK_SIZE,
            "num_blocks": self._num_blocks,
            "block_bytes": 2 * 30 * 3 * 64 * 2 * _BLOCK_SIZE,
            "max_num_seqs": self._most,
            "max_num_batched_tokens": 2048,
            "max_model_len": 8192,
            "model_shape": {
                "num_layers": 30,
                "num_kv_heads": 3,
                "head_dim": 64,
                "kv_dtype_bytes": 2,
                "weight_bytes": 269_000_000,
            },
            "kv_reservation": "paged",
            "prefix_caching": True,
            "owners": _encoded(self.owners, "<u2"),
            "refs": _encoded(self.refs, "u1"),
        }

    def state_event(self, changed: NDArray[np.intp], steps: list[list[Any]]) -> dict[str, Any]:
        """One state; ``changed`` are the cells that it tells of."""
        free, cached = int((self.owners == 0).sum()), int((self.owners == 1).sum())
        waiting = 0 if self.is_idle else 3
        places = sum(len(each.blocks) for each in self._running) * _BLOCK_SIZE
        tokens = sum(each.prompt + each.output for each in self._running)
        latency = {"p50": 0.0041, "p90": 0.0068, "p99": 0.0213, "count": 900} if self._finished else {}
        return {
            "time": self._tick / 4,
            "changed": {
                "blocks": _encoded(changed, "<u4"),
                "owners": _encoded(self.owners[changed], "<u2"),
                "refs": _encoded(self.refs[changed], "u1"),
            },
            "requests": [self._row(each, "running") for each in self._running]
            + [self._row(_Request(9000 + i, 1200, 64), "waiting") for i in range(waiting)],
            "requests_total": len(self._running) + waiting,
            "steps": steps,
            "counts": {
                "running": len(self._running),
                "waiting": waiting,
                "preparing": 0,
                "free": free,
                "cached": cached,
                "used": self._num_blocks - free - cached,
                "preemptions": self._tick // 40,
                "recomputed_tokens": self._tick * 3,
                "prompt_tokens": self._totals["prompt"],
                "generation_tokens": self._totals["generated"],
                "prefix_queries": self._totals["prompt"],
                "prefix_hits": self._totals["hits"],
                "kv_waste": 1 - min(tokens, places) / places if places else 0.0,
            },
            "misses": {"cold": self._totals["prompt"] - self._totals["hits"], "evicted": 310, "partial_block": 77},
            "rates": {
                "prompt_tokens_per_second": 900.0 + 300 * (self._tick % 3) if self._running else 0.0,
                "generation_tokens_per_second": 32.0 * len(self._running) + self._tick % 7,
            },
            "latency": {
                "ttft": {**dict.fromkeys(("p50", "p90", "p99")), "count": 0, **{k: v * 20 for k, v in latency.items()}},
                "itl": {**dict.fromkeys(("p50", "p90", "p99")), "count": 0, **latency},
            },
            "drafts": {"verifies": 100, "proposed": 400, "accepted": 236, "accepted_by_position": [88, 70, 48, 30]},
            "adapters": {
                "num_slots": 2,
                "loaded": [
                    {"name": "sql", "slot": 0, "requests": 4, "bytes": 4_300_000, "in_host": True},
                    {"name": "legal", "slot": 1, "requests": 2, "bytes": 4_300_000, "in_host": True},
                    {"name": "poems", "slot": None, "requests": 0, "bytes": 8_600_000, "in_host": True},
                ],
            },
        }

    def _row(self, each: _Request, state: str) -> dict[str, Any]:
        is_running = state == "running"
        return {
            "id": each.id,
            "key": each.key if is_running else 0,
            "state": state,
            "adapter": each.adapter,
            "prompt_tokens": each.prompt,
            "cached_tokens": _SHARED * _BLOCK_SIZE if is_running and each.key > 2 else 0,
            "computed_tokens": each.prompt + each.output if is_running else 0,
            "output_tokens": each.output,
            "num_blocks": len(each.blocks),
            "preemptions": int(each.key % 5 == 0),
            "age": each.output / 32 + 0.2,
            "queue_seconds": 0.013,
        }

    async def _requests(self, request: Request) -> Response:
        return JSONResponse(
            {
                "running": [each.id for each in self._running],
                "waiting": [],
                "finished": [each.id for each in self._finished],
            }
        )

    async def _request(self, request: Request) -> Response:
        wanted = request.path_params["id"]
        found = [each for each in (*self._running, *self._finished) if each.id == wanted]
        if not found:
            error = {"message": f"The request {wanted!r} is not known.", "type": "NotFoundError", "code": 404}
            return JSONResponse({"error": error}, 404)
        each = found[0]
        is_running = each in self._running
        return JSONResponse(
            {
                "id": each.id,
                "state": "running" if is_running else "finished",
                "finish_reason": None if is_running else "stop",
                "model": "stand-in",
                "adapter": each.adapter,
                "arrived": 1_790_000_000.0,
                "times": {"preparing": 0.002, "queue": 0.013, "prefill": 0.21, "decode": 1.4, "total": 1.625},
                "prompt_tokens": each.prompt,
                "cached_tokens": _SHARED * _BLOCK_SIZE,
                "misses": {"cold": each.prompt - _SHARED * _BLOCK_SIZE},
                "output_tokens": each.output,
                "chunks": [2048, each.prompt % 2048],
                "preemptions": 0,
                "recomputed_tokens": 0,
                "drafts": {"proposed": 40, "accepted": 21, "accepted_by_position": [9, 6, 4, 2]},
                "block_size": _BLOCK_SIZE,
                "block_table": [block + 1 for block in each.blocks] if is_running else [],
            }
        )
