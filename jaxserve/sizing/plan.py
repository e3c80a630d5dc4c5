"""What an engine would allocate, from what is known of it before a weight is read.

The order is that of a start: weights, what guesses, adapters; then KV gets the room that is left, by the rule of the
device; then what is kept of rows. What does not fit is said, not raised: a plan that answers "no" is an answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.models.config import ModelConfig
from jaxserve.sizing.blocks import (
    KVSize,
    block_bytes,
    check_chunking,
    check_context,
    check_draft_context,
    check_ram,
    fit_context,
    largest_context,
    most_useful_blocks,
    size_cache,
)
from jaxserve.sizing.forms import WeightForm
from jaxserve.sizing.memory import Memory
from jaxserve.sizing.state import Guesses, draft_bytes, mask_bytes, row_bytes
from jaxserve.sizing.weights import FLOAT_BYTES
from jaxserve.sizing.workspace import Workspace, workspace_bound

__all__ = ["Drafts", "MemoryPlan", "Parts", "plan_memory"]

_ENDLESS = 2**62
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Drafts:
    """What speculation adds.

    Attributes:
        guesses: what is kept of rows.
        weights: bytes of its parameters, by how they are stored.
        model: whose KV lies beside the model's; None if there is none.
        state_size: values that are kept of each token beside KV.
    """

    guesses: Guesses = field(default_factory=Guesses)
    weights: Mapping[str, int] = field(default_factory=dict)
    model: ModelConfig | None = None
    state_size: int = 0


@dataclass(frozen=True, slots=True)
class Parts:
    """What is known of an engine before its memory is.

    Attributes:
        model: what it computes.
        dtype: of activations and KV.
        form: how weights are held.
        weights: their bytes, by how they are stored.
        drafts: what guesses.
        slot_bytes: of a slot for an adapter, 0 without adapters.
        num_slots: how many.
        limits: most tokens and rows of a step.
        places: numbers of places that a step may sample at, the largest last.
    """

    model: ModelConfig
    dtype: str
    form: WeightForm
    weights: Mapping[str, int]
    drafts: Drafts
    slot_bytes: int
    num_slots: int
    limits: tuple[int, int]
    places: tuple[int, ...]

    @property
    def held(self) -> int:
        """Bytes that are on the device before KV is: of weights and adapters."""
        return sum(self.weights.values()) + sum(self.drafts.weights.values()) + self.num_slots * self.slot_bytes


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of all that an engine allocates.

    Attributes:
        memory: the device's.
        weights, draft_weights: of parameters, by how they are stored.
        adapters: of all slots.
        kv: the pool; None if there is no room for one.
        kv_room: bytes that it could have.
        token_bytes: of one token's KV in the model.
        rows, drafts, masks: of what is kept of rows, of their drafts, and of masks without a constraint.
        workspace: of a step's scratch, a bound.
        max_model_len: longest context that is served, tokens; 0 if none can be.
        largest_max_model_len: the longest that one sequence could have.
        problems: why such an engine would not start.
    """

    memory: Memory
    weights: Mapping[str, int]
    draft_weights: Mapping[str, int]
    adapters: int
    kv: KVSize | None
    kv_room: int
    token_bytes: int
    rows: int
    drafts: int
    masks: int
    workspace: Workspace
    max_model_len: int
    largest_max_model_len: int
    problems: tuple[str, ...]

    @property
    def allocated(self) -> int:
        """Bytes that stay allocated."""
        kv = self.kv.num_bytes if self.kv else 0
        weights = sum(self.weights.values()) + sum(self.draft_weights.values())
        return weights + self.adapters + kv + self.rows + self.drafts + self.masks

    @property
    def left(self) -> int:
        """Bytes that are left for scratch; negative if what is allocated does not fit."""
        return self.memory.limit - self.allocated


def plan_memory(config: EngineConfig, parts: Parts, memory: Memory) -> MemoryPlan:
    """Size an engine for a device. ConfigError: the flags cannot work with this model on any device."""
    cache, model, (max_tokens, max_rows) = config.cache, parts.model, parts.limits
    asked, guesses = config.model.max_model_len, parts.drafts.guesses
    check_context(model, asked)
    if asked is not None:
        check_chunking(config.scheduler, max_tokens, asked)
    itemsize = FLOAT_BYTES[parts.dtype]
    others = () if parts.drafts.model is None else (parts.drafts.model,)
    per_block = block_bytes((model, *others), cache.block_size, itemsize, parts.drafts.state_size)
    room = memory.room(parts.held, cache.gpu_memory_utilization)
    kv: KVSize | None = None
    max_context = largest = 0
    problems = list(_weight_problems(parts, memory, config))
    try:
        unbound = size_cache(cache, per_block, most_useful=_ENDLESS, room=lambda: room)
        largest = largest_context(unbound, cache, model)
        useful = most_useful_blocks(model, asked, max_rows, cache.block_size)
        kv = size_cache(cache, per_block, most_useful=useful, room=lambda: room)
        max_context = fit_context(kv, cache, model, asked)
        check_chunking(config.scheduler, max_tokens, max_context)
        if parts.drafts.model is not None:
            check_draft_context(parts.drafts.model, max_context)
    except ConfigError as error:
        problems += [] if problems else [error.as_typed()]
    history = guesses.history(max_context)
    plan = MemoryPlan(
        memory,
        parts.weights,
        parts.drafts.weights,
        parts.num_slots * parts.slot_bytes,
        kv,
        max(0, cache.kv_cache_memory_bytes or room[0]),
        block_bytes((model,), 1, itemsize),
        row_bytes(max_rows, model.vocab_size, history, guesses.max_depth),
        draft_bytes(max_rows, guesses),
        mask_bytes(parts.places, model.vocab_size),
        _workspace(parts, max_context or asked or model.max_position, on_cpu=memory.on_cpu),
        max_context,
        largest,
        tuple(problems),
    )
    return plan if problems else _checked(plan, parts)


def _workspace(parts: Parts, max_context: int, *, on_cpu: bool) -> Workspace:
    max_tokens, max_rows = parts.limits
    return workspace_bound(
        parts.model,
        max_tokens=max_tokens,
        max_rows=max_rows,
        max_places=parts.places[-1],
        max_context=max_context,
        queries=1 + parts.drafts.guesses.num_drafts,
        on_cpu=on_cpu,
        unpacks=parts.form.is_quantised and parts.form.backend == "reference",
    )


def _weight_problems(parts: Parts, memory: Memory, config: EngineConfig) -> Iterator[str]:
    """What is held before KV is leaves no room at all."""
    share = 1.0 if memory.on_cpu else config.cache.gpu_memory_utilization
    limit = int(memory.limit * share)
    if parts.held >= limit:
        what = "weights and adapters do" if parts.num_slots else "the weights do"
        yield f"{what} not fit: they take {parts.held / _GIB:.2f} GiB, and {limit / _GIB:.2f} GiB can be used."


def _checked(plan: MemoryPlan, parts: Parts) -> MemoryPlan:
    """The plan, with what is wrong if all together does not fit: asked blocks or bytes may be more than there is."""
    assert plan.kv is not None
    if plan.left >= 0:
        return plan
    problem = (
        f"it does not fit: {plan.allocated / _GIB:.2f} GiB are allocated in all, {plan.kv.num_bytes / _GIB:.2f} GiB of "
        f"them for KV (by {plan.kv.reason}), and {plan.memory.limit / _GIB:.2f} GiB can be used."
    )
    if plan.memory.on_cpu:
        try:
            check_ram(plan.kv, plan.rows + plan.drafts, parts.limits[1], plan.memory.limit - parts.held)
        except ConfigError as error:
            problem = str(error)
    return replace(plan, problems=(problem,))
