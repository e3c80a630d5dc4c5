"""What would make a plan better, or possible: flags that a user can set, and devices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jaxserve.config import EngineConfig
from jaxserve.models.spec import ParamSpec
from jaxserve.roofline import CHIPS
from jaxserve.sizing import Memory, MemoryPlan, Mix, Parts, PlanOptions, WeightForm, gpu_memory, weight_sizes

__all__ = ["Alternative", "Suggestion", "alternatives", "suggestions"]

_GIB = 1 << 30
_ROUND = 256  # tokens, of a context that is suggested
_MOST_ROWS = 1 << 16  # of --max-num-seqs


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another way to hold the weights: flags or a device, bytes, and whether these fit."""

    what: str
    num_bytes: int
    fits: bool


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A flag or a variable to set, and why."""

    flag: str
    why: str


def alternatives(
    config: EngineConfig, specs: Sequence[ParamSpec], parts: Parts, memory: Memory, environment: Mapping[str, str]
) -> Iterator[Alternative]:
    """Where weights do not fit: other forms of them on this device, and other devices for this form."""
    limit = _usable(config, memory)
    if parts.held < limit:
        return
    others = parts.held - sum(parts.weights.values())
    for dtype, quantization in dict.fromkeys([(parts.dtype, "int8"), ("bfloat16", "none"), ("bfloat16", "int8")]):
        form = WeightForm(quantization, parts.form.packed, parts.form.backend)
        size = others + sum(weight_sizes(specs, form, dtype).values())
        if size < parts.held:
            flags = [f"--dtype {dtype}"] * (dtype != parts.dtype) + [f"--quantization {quantization}"]
            yield Alternative(" ".join(flags), size, size < limit)
    if memory.on_cpu:
        return
    for name, chip in CHIPS.items():
        if name != "cpu" and chip.memory > memory.total:
            fits = parts.held < _usable(config, gpu_memory(chip.memory, environment))
            yield Alternative(f"--gpu {name}", parts.held, fits)
    count = parts.held // max(limit, 1) + 1
    yield Alternative(f"{count} such devices, but an engine uses one: no tensor parallelism", parts.held, fits=False)


def suggestions(
    config: EngineConfig, options: PlanOptions, parts: Parts, planned: MemoryPlan, sessions: Sequence[Mix]
) -> Iterator[Suggestion]:
    """Flags to set, in the order of what they change."""
    yield from _of_memory(config, planned)
    yield from _of_contexts(config, options, planned)
    yield from _of_sessions(options, parts, planned, sessions)


def _usable(config: EngineConfig, memory: Memory) -> int:
    """Bytes that weights must stay below."""
    return memory.limit if memory.on_cpu else int(memory.limit * config.cache.gpu_memory_utilization)


def _of_memory(config: EngineConfig, planned: MemoryPlan) -> Iterator[Suggestion]:
    memory, scratch = planned.memory, planned.workspace.num_bytes
    if memory.is_default:
        more = int(memory.total * 0.95) - memory.limit
        yield Suggestion(
            "XLA_PYTHON_CLIENT_MEM_FRACTION=0.95",
            f"an environment variable: JAX reserves {memory.limit / memory.total:.0%} of a GPU by default; "
            f"{more / _GIB:.1f} GiB more",
        )
    by_share = config.cache.kv_cache_memory_bytes is None and config.cache.num_gpu_blocks_override is None
    if memory.on_cpu or planned.kv is None or not by_share or planned.left >= scratch:
        return
    besides = planned.rows + planned.drafts + planned.masks + scratch
    share = math.floor(100 * (memory.limit - besides) / memory.limit) / 100
    if 0 < share < config.cache.gpu_memory_utilization:
        yield Suggestion(
            f"--gpu-memory-utilization {share:g}",
            f"leaves room for a step's scratch, {scratch / _GIB:.2f} GiB at most",
        )


def _of_contexts(config: EngineConfig, options: PlanOptions, planned: MemoryPlan) -> Iterator[Suggestion]:
    asked = config.model.max_model_len
    if asked is not None and 0 < planned.largest_max_model_len < asked:
        yield Suggestion(f"--max-model-len {planned.largest_max_model_len}", "the longest context that fits")
    longest = -(-max(options.context, default=0) // _ROUND) * _ROUND
    if asked is None and 0 < longest < planned.max_model_len:
        yield Suggestion(f"--max-model-len {longest}", "no session is longer")


def _of_sessions(
    options: PlanOptions, parts: Parts, planned: MemoryPlan, sessions: Sequence[Mix]
) -> Iterator[Suggestion]:
    wanted, max_rows = options.sessions, parts.limits[1]
    if wanted is None or planned.kv is None:
        return
    if max_rows != wanted <= _MOST_ROWS and sessions[-1].paged.sessions >= wanted:
        beyond = f"without it no more than {max_rows} are computed at once"
        why = beyond if wanted > max_rows else "state and programs for no more than these"
        yield Suggestion(f"--max-num-seqs {wanted}", why)
    blocks = math.ceil(wanted * sessions[-1].blocks) + 1
    missing = (blocks - planned.kv.num_blocks) * planned.kv.block_bytes
    if missing > 0 and planned.memory.on_cpu and planned.left - missing >= planned.workspace.num_bytes:
        size = blocks * planned.kv.block_bytes
        yield Suggestion(f"--kv-cache-memory-bytes {size}", f"room for {wanted} sessions, which this machine has")
