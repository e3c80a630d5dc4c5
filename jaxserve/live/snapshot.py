"""One moment of an engine, as plain data.

It is taken between two steps, so that it holds together: the references of every block are its uses in the tables. It
must not cost the next step anything, so block tables are not copied: a snapshot has the requests' own lists, of which
it may read what was there. A request's table grows at its end alone, and one that is given back is left as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxserve.outputs import EngineStats

__all__ = ["MAX_REQUESTS", "MAX_STEPS", "EngineShape", "RequestRow", "Snapshot", "StepRow", "Table"]

MAX_REQUESTS = 256
"""Most requests that a snapshot tells of."""

MAX_STEPS = 512
"""Most steps that it tells of, the newest."""


@dataclass(frozen=True, slots=True)
class EngineShape:
    """What of an engine never changes.

    Attributes:
        block_size, num_blocks, block_bytes: tokens per block, blocks without the null block, and bytes of one in all
            layers, with whatever else lies under its id.
        max_num_seqs, max_num_batched_tokens: most rows and tokens of a step.
        num_layers, num_kv_heads, head_dim, kv_dtype_bytes: of the model's KV.
        weight_bytes: of the model's weights on the device.
        kv_reservation, prefix_caching: as in ``CacheConfig``.
        speculates: drafts are made.
    """

    block_size: int
    num_blocks: int
    block_bytes: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    kv_dtype_bytes: int
    weight_bytes: int
    kv_reservation: str = "paged"
    prefix_caching: bool = True
    speculates: bool = False


class Table(NamedTuple):
    """The block table of the running request with this ``key``: the first ``num_blocks`` entries of ``blocks``."""

    key: int
    blocks: list[int]
    num_blocks: int


class RequestRow(NamedTuple):
    """One unfinished request (of n completions, one of them).

    Attributes:
        id: as its user knows it.
        key: a number from 2 to 65535 that it keeps while it is listed, 0 while it is being prepared.
        state: "running", "waiting" or "preparing".
        prompt_tokens, cached_tokens, computed_tokens, output_tokens: of these the computed ones have KV, or will by the
            steps in flight.
        num_blocks, preemptions: see ``Request``.
        arrived_at, scheduled_at: ``time.monotonic()``; 0.0 if it was never admitted.
        adapter: name of its adapter, None for the base model.
    """

    id: str
    key: int
    state: str
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int
    num_blocks: int
    preemptions: int
    arrived_at: float
    scheduled_at: float
    adapter: str | None = None


class StepRow(NamedTuple):
    """One step: when it was done (``time.monotonic()``), how long it took, and what it computed.

    A row is a decode if it computes its newest token alone, a verify if drafts follow that (the token and the drafts
    count), and else prefill. ``padding`` is what its bucket had more than these.
    """

    ended_at: float
    seconds: float
    kind: str
    prefill_tokens: int
    decode_tokens: int
    verify_tokens: int
    padding_tokens: int
    num_rows: int


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """One moment.

    Attributes:
        taken_at: ``time.monotonic()``.
        refs, published: per block, the null block included: see ``BlockPool.state``.
        tables: of all running requests, in the order of service.
        requests: at most MAX_REQUESTS, running ones first; ``num_requests`` counts all.
        num_preparing: of these, those that are not queued yet.
        steps: the newest MAX_STEPS, or fewer; ``num_steps`` counts all since somebody looks.
        stats: counts of the engine.
        ttft, itl: seconds from arrival to the first token, and between tokens: the newest samples.
    """

    taken_at: float
    refs: NDArray[np.uint32]
    published: NDArray[np.uint8]
    tables: tuple[Table, ...]
    requests: tuple[RequestRow, ...]
    num_requests: int
    steps: tuple[StepRow, ...]
    num_steps: int
    stats: EngineStats
    num_preparing: int = 0
    ttft: tuple[float, ...] = ()
    itl: tuple[float, ...] = ()
