"""Snapshots of an engine as the events of ``GET /debug/live``: ``start`` with the whole map, then ``state`` by state.

All of it is made in threads of their own, once for all who look: of a map of 100,000 blocks a start has 400 KB. Arrays
are base64 of little-endian numbers.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxserve.live import BlockMap, Changes, EngineShape, RequestRow, Snapshot, StepRow, percentiles
from jaxserve.outputs import AdapterInfo, EngineStats
from jaxserve.server.jsonio import dumps

__all__ = ["Painter", "Picture", "answer_id", "as_event"]

_NOTHING = Changes(np.zeros(0, np.uint32), np.zeros(0, np.uint16), np.zeros(0, np.uint8))


def answer_id(engine_request: str) -> str:
    """The id of the answer that an engine request belongs to: each prompt of an HTTP request adds its position."""
    return engine_request.rpartition("-")[0]


def as_event(name: str, data: Mapping[str, Any]) -> bytes:
    """The lines of an event, without the empty one that ends it."""
    return b"event: " + name.encode("ascii") + b"\ndata: " + dumps(data)


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """One state as it was drawn: the event that leads to it from the one before, and what a newcomer needs of it."""

    lines: bytes
    _state: Mapping[str, Any]
    _owners: NDArray[np.uint16]
    _refs: NDArray[np.uint8]
    _about: Mapping[str, Any]

    def start(self) -> bytes:
        """The event ``start``, and this state with nothing changed since."""
        # Appended, since an encoder of JSON would look at every byte of the map, and nobody else could work meanwhile.
        start = as_event("start", self._about)[:-1]
        arrays = b',"owners":"%b","refs":"%b"}' % (_encoded(self._owners), _encoded(self._refs))
        return start + arrays + b"\n\n" + as_event("state", {**self._state, "changed": _changed(_NOTHING)})


class Painter:
    """Draws one snapshot after the other, each as what is new since the one before. One thread at a time.

    Args:
        model: the name that is served.
        max_model_len: longest context, tokens.
        shape: of the engine.
        began: ``time.monotonic()`` of when the server started: times are told in seconds since then.
        interval: seconds between states.
    """

    def __init__(self, model: str, max_model_len: int, shape: EngineShape, *, began: float, interval: float) -> None:
        self._shape = shape
        self._began = began
        self._about = {
            "model": model,
            "interval": interval,
            "block_size": shape.block_size,
            "num_blocks": shape.num_blocks,
            "block_bytes": shape.block_bytes,
            "max_num_seqs": shape.max_num_seqs,
            "max_num_batched_tokens": shape.max_num_batched_tokens,
            "max_model_len": max_model_len,
            "model_shape": {
                name: getattr(shape, name)
                for name in ("num_layers", "num_kv_heads", "head_dim", "kv_dtype_bytes", "weight_bytes")
            },
            "kv_reservation": shape.kv_reservation,
            "prefix_caching": shape.prefix_caching,
        }
        self._map = BlockMap(shape.num_blocks)
        self._before: tuple[float, int, EngineStats] | None = None

    def draw(self, snapshot: Snapshot, adapters: tuple[int, Sequence[AdapterInfo]]) -> Picture:
        """The next state. ``adapters`` are the number of slots, and the adapters that are loaded."""
        stats, now = snapshot.stats, snapshot.taken_at
        then, num_steps, before = self._before or (now, snapshot.num_steps - len(snapshot.steps), stats)
        self._before = (now, snapshot.num_steps, stats)
        changes = self._map.update(snapshot)
        num_new = min(snapshot.num_steps - num_steps, len(snapshot.steps))
        state = {
            "time": self._since(now),
            "requests": [self._request(row, now) for row in snapshot.requests],
            "requests_total": snapshot.num_requests,
            "steps": [self._step(step) for step in snapshot.steps[len(snapshot.steps) - num_new :]],
            "counts": _counts(stats, snapshot.num_preparing),
            "misses": dict(stats.prefix_misses),
            "rates": _rates(stats, before, now - then),
            "latency": {"ttft": percentiles(snapshot.ttft), "itl": percentiles(snapshot.itl)},
            "drafts": _drafts(stats) if self._shape.speculates else None,
            "adapters": _adapters(*adapters) if adapters[0] else None,
        }
        lines = as_event("state", {**state, "changed": _changed(changes)})
        return Picture(lines, state, self._map.owners, self._map.refs, self._about)

    def _since(self, moment: float) -> float:
        return round(moment - self._began, 6)

    def _request(self, row: RequestRow, now: float) -> dict[str, Any]:
        queued = 0.0 if row.state == "preparing" else (row.scheduled_at or now) - row.arrived_at
        return {
            "id": answer_id(row.id),
            "key": row.key,
            "state": row.state,
            "adapter": row.adapter,
            "prompt_tokens": row.prompt_tokens,
            "cached_tokens": row.cached_tokens,
            "computed_tokens": row.computed_tokens,
            "output_tokens": row.output_tokens,
            "num_blocks": row.num_blocks,
            "preemptions": row.preemptions,
            "age": round(max(0.0, now - row.arrived_at), 4),
            "queue_seconds": round(max(0.0, queued), 4),
        }

    def _step(self, step: StepRow) -> list[Any]:
        return [self._since(step.ended_at), round(step.seconds, 6), *step[2:]]


def _counts(stats: EngineStats, num_preparing: int) -> dict[str, int | float]:
    return {
        "running": stats.num_running,
        "waiting": stats.num_waiting,
        "preparing": num_preparing,
        "free": stats.num_free_blocks - stats.num_cached_blocks,
        "cached": stats.num_cached_blocks,
        "used": stats.num_blocks - stats.num_free_blocks,
        "preemptions": stats.preemptions_total,
        "recomputed_tokens": stats.recomputed_tokens_total,
        "prompt_tokens": stats.prompt_tokens_total,
        "generation_tokens": stats.generation_tokens_total,
        "prefix_queries": stats.prefix_queries_total,
        "prefix_hits": stats.prefix_hits_total,
        "kv_waste": round(stats.kv_waste, 4),
    }


def _rates(stats: EngineStats, before: EngineStats, seconds: float) -> dict[str, float]:
    counts = {
        "prompt_tokens_per_second": stats.prompt_tokens_total - before.prompt_tokens_total,
        "generation_tokens_per_second": stats.generation_tokens_total - before.generation_tokens_total,
    }
    return {name: round(count / seconds, 2) if seconds > 0 else 0.0 for name, count in counts.items()}


def _drafts(stats: EngineStats) -> dict[str, Any]:
    drafts = stats.speculation
    return {
        "verifies": drafts.num_drafts,
        "proposed": drafts.num_draft_tokens,
        "accepted": drafts.num_accepted_tokens,
        "accepted_by_position": drafts.accepted_by_position,
    }


def _adapters(num_slots: int, loaded: Sequence[AdapterInfo]) -> dict[str, Any]:
    shown = [
        {
            "name": info.name,
            "slot": info.slot,
            "requests": info.num_requests,
            "bytes": info.num_bytes,
            "in_host": info.in_host,
        }
        for info in loaded
    ]
    return {"num_slots": num_slots, "loaded": shown}


def _changed(changes: Changes) -> dict[str, str]:
    return {
        "blocks": _base64(changes.cells),
        "owners": _base64(changes.owners),
        "refs": _base64(changes.refs),
    }


def _base64(numbers: NDArray[Any]) -> str:
    return _encoded(numbers).decode("ascii")


def _encoded(numbers: NDArray[Any]) -> bytes:
    return base64.b64encode(numbers.astype(numbers.dtype.newbyteorder("<"), copy=False).tobytes())
