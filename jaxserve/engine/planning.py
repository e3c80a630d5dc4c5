"""``jaxserve plan``: what an engine would take and reach, from its flags and a model's settings alone.

Nothing is loaded and no device is asked for: settings and headers are opened as at a start, sized by the arithmetic
that a start uses (``sizing``), and held against the data sheet of a chip (``roofline``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from jaxserve.config import EngineConfig
from jaxserve.engine.adapters import adapter_layout
from jaxserve.engine.loading import products_backend
from jaxserve.engine.plan_advice import Alternative, Suggestion, alternatives, suggestions
from jaxserve.engine.planned_drafts import plan_drafts
from jaxserve.engine.speculation import resolve
from jaxserve.errors import ConfigError, MissingFileError
from jaxserve.models.registry import param_specs
from jaxserve.models.spec import Use
from jaxserve.roofline import CHIPS, MODELS, Bound, Chip, Precision, StepShape, Work, step_bound, step_work
from jaxserve.runner import Buckets
from jaxserve.sizing import (
    FLOAT_BYTES,
    GROUP,
    Memory,
    MemoryPlan,
    Mix,
    Parts,
    PlanOptions,
    activation_dtype,
    all_specs,
    check_rounding,
    choose_form,
    cpu_memory,
    gpu_memory,
    mix_of,
    plan_memory,
    step_limits,
    weight_sizes,
)
from jaxserve.weights import ModelSettings, kept_kinds, open_settings

__all__ = ["Bounds", "DecodeBound", "Plan", "make_plan"]

_CONTEXTS = (1024, 8192)


@dataclass(frozen=True, slots=True)
class DecodeBound:
    """The least time of a step that decodes, by the roofline.

    Attributes:
        sessions, context: rows of the step, and tokens of each.
        seconds: without drafts; no program is faster.
        tokens_per_second: most that all sessions together are given: with drafts, if all are right and cost nothing.
        is_memory_bound: whether bytes, and not operations, take that long.
    """

    sessions: int
    context: int
    seconds: float
    tokens_per_second: float
    is_memory_bound: bool


@dataclass(frozen=True, slots=True)
class Bounds:
    """Least times by the data sheet of a chip (``jaxserve.roofline``).

    Attributes:
        chip: which.
        decodes: a step for each of the plan's ``sessions``, with as many of them as fit and may run at once.
        prompt_tokens, prompt_seconds: the largest step of nothing but a prompt.
    """

    chip: str
    decodes: tuple[DecodeBound, ...]
    prompt_tokens: int
    prompt_seconds: float


@dataclass(frozen=True, slots=True)
class Plan:
    """All of it.

    Attributes:
        model: as the user named it.
        device: the same.
        dtype: of activations and KV.
        quantization: form of the weights in memory.
        max_num_seqs, max_num_batched_tokens, block_size: of the engine.
        max_loras: slots for adapters, 0 without.
        memory: bytes.
        sessions: of each context, and of their mix if there are several.
        wanted: sessions that were asked for.
        bounds: least times, None where the chip is unknown.
        alternatives: what would fit, if the weights do not.
        suggestions: flags that make it better, or possible.
        problems: why the answer is no; empty if it is yes.
    """

    model: str
    device: str
    dtype: str
    quantization: str
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    max_loras: int
    memory: MemoryPlan
    sessions: tuple[Mix, ...]
    wanted: int | None
    bounds: Bounds | None
    alternatives: tuple[Alternative, ...]
    suggestions: tuple[Suggestion, ...]
    problems: tuple[str, ...]


def make_plan(config: EngineConfig, options: PlanOptions, environment: Mapping[str, str]) -> Plan:
    """Plan an engine of ``config`` for what ``options`` ask; ``environment`` says how much of a GPU JAX reserves.

    Raises:
        LoadError: the model's settings cannot be read, or it is not served.
        ConfigError: a value cannot work with this model, whatever the device.
    """
    chip, memory = _device(options.gpu, environment)
    settings = _open(config)
    parts = _parts(config, settings, memory)
    _check_contexts(config, options, parts)
    planned = plan_memory(config, parts, memory)
    defaults: list[tuple[int, ...]] = [(tokens,) for tokens in _default_contexts(planned.max_model_len)]
    sessions = tuple(_sessions(config, planned, _mixes(options.context) or defaults))
    others = alternatives(config, list(all_specs(settings.specs)), parts, memory, environment)
    problems = (*planned.problems, *_session_problems(options, planned, sessions))
    return Plan(
        config.model.model,
        options.gpu,
        parts.dtype,
        parts.form.quantization,
        parts.limits[1],
        parts.limits[0],
        config.cache.block_size,
        parts.num_slots,
        planned,
        sessions,
        options.sessions,
        None if chip is None or planned.problems else _bounds(chip, settings, parts, options, sessions),
        tuple(others),
        tuple(suggestions(config, options, parts, planned, sessions)),
        problems,
    )


def _device(name: str, environment: Mapping[str, str]) -> tuple[Chip | None, Memory]:
    """The chip, None if nothing but its memory is known, and its memory. ConfigError: it is no device."""
    if name == "cpu":
        return CHIPS["cpu"], cpu_memory()
    if name in CHIPS:
        return CHIPS[name], gpu_memory(CHIPS[name].memory, environment)
    if name.isdecimal() and int(name) > 0:
        return None, gpu_memory(int(name), environment)
    raise ConfigError(f"gpu must be one of {', '.join(CHIPS)}, or bytes of memory such as 48G, got {name!r}.", "gpu")


def _open(config: EngineConfig) -> ModelSettings:
    """Settings of the model; of a well-known one also if it is not here."""
    try:
        settings = open_settings(config.model)
    except MissingFileError:
        known = MODELS.get(config.model.model)
        if known is None:
            raise
        settings = ModelSettings(known, param_specs(known, "hf"), {})
    if config.model.load_format != "dummy":
        return settings
    # Random weights are made in any form, that of blocks being Q4_1 (``weights.dummy``).
    factors = (spec for spec in all_specs(settings.specs) if spec.is_factor and spec.size_in % GROUP == 0)
    return replace(settings, kinds={source.name: "Q4_1" for spec in factors for source in spec.sources})


def _parts(config: EngineConfig, settings: ModelSettings, memory: Memory) -> Parts:
    model, on_cpu = settings.config, memory.on_cpu
    limits = step_limits(config.scheduler, on_cpu=on_cpu)
    dtype = activation_dtype(config.model, model, on_cpu=on_cpu)
    backend = products_backend(on_cpu=on_cpu)
    if config.model.activation_quantization == "int8" and not on_cpu:
        raise ConfigError("--activation-quantization int8 is made for the CPU's native kernels; leave it at none.")
    is_random = config.model.load_format == "dummy"
    kept = () if is_random else kept_kinds(settings.kinds)
    form = choose_form(config.model, kept, backend=backend, has_random_weights=is_random)
    weights = weight_sizes(all_specs(settings.specs), form, dtype, settings.kinds)
    check_rounding(form, config.model.model, has_quantised=bool(weights.keys() - FLOAT_BYTES.keys()))
    drafts = plan_drafts(resolve(config.speculative, max_tokens=limits[0]), config.model, model, dtype, backend)
    layout = adapter_layout(config.lora, model, dtype)
    return Parts(
        model,
        dtype,
        form,
        weights,
        drafts,
        0 if layout is None else layout.slot_bytes,
        0 if layout is None else config.lora.max_loras,
        limits,
        Buckets(*limits, drafts.guesses.num_drafts).places,
    )


def _check_contexts(config: EngineConfig, options: PlanOptions, parts: Parts) -> None:
    most = config.model.max_model_len or parts.model.max_position
    for tokens in options.context:
        if tokens > most:
            limit = "max_model_len" if config.model.max_model_len else "the model's longest context"
            raise ConfigError(f"context {tokens} is more than {limit} ({most} tokens).", "context")


def _default_contexts(max_model_len: int) -> list[int]:
    return sorted({*(tokens for tokens in _CONTEXTS if tokens < max_model_len), max_model_len} - {0})


def _mixes(contexts: Sequence[int]) -> list[tuple[int, ...]]:
    """Each context, and all of them together if they differ."""
    alone: list[tuple[int, ...]] = [(tokens,) for tokens in dict.fromkeys(contexts)]
    return [*alone, tuple(contexts)] if len(alone) > 1 else alone


def _sessions(config: EngineConfig, planned: MemoryPlan, mixes: Sequence[tuple[int, ...]]) -> Iterator[Mix]:
    for mix in mixes:
        yield mix_of(
            mix,
            num_blocks=planned.kv.num_blocks if planned.kv else 1,
            block_size=config.cache.block_size,
            max_context=max(planned.max_model_len, *mix),
            token_bytes=planned.token_bytes,
        )


def _session_problems(options: PlanOptions, planned: MemoryPlan, sessions: Sequence[Mix]) -> Iterator[str]:
    if planned.problems:
        return
    if options.context and max(options.context) > planned.max_model_len:
        yield f"a session of {max(options.context)} tokens does not fit: the longest has {planned.max_model_len}."
    elif options.sessions is not None and sessions[-1].paged.sessions < options.sessions:
        mean = sessions[-1].mean
        yield f"{options.sessions} sessions of {mean:.0f} tokens do not fit at once: {sessions[-1].paged.sessions} do."


def _bounds(chip: Chip, settings: ModelSettings, parts: Parts, options: PlanOptions, sessions: Sequence[Mix]) -> Bounds:
    """Least times, with the bytes of weights as they are held: all but a table that is only looked up is read."""
    read = [spec for spec in all_specs(settings.specs) if spec.use is not Use.LOOKUP]
    weights = sum(weight_sizes(read, parts.form, parts.dtype, settings.kinds).values())
    dtypes = Precision(parts.dtype, parts.dtype, parts.dtype)

    def bound(step: StepShape) -> Bound:
        works = [replace(work, weight_bytes=0.0) for work in step_work(parts.model, step, dtypes)]
        return step_bound([*works, Work("weights", 1, weight_bytes=weights)], chip, parts.dtype)

    def decode(mix: Mix) -> DecodeBound:
        rows, context = max(1, min(parts.limits[1], options.sessions or mix.paged.sessions)), round(mix.mean)
        plain, guesses = bound(StepShape(rows, context)), parts.drafts.guesses
        verify = StepShape(rows, max(context, guesses.num_drafts + 1), guesses.num_drafts)
        most = max(rows / plain.seconds, rows * (1 + guesses.max_depth) / bound(verify).seconds)
        return DecodeBound(rows, context, plain.seconds, most, plain.is_memory_bound)

    chunk = min(parts.limits[0], parts.model.max_position)
    prompt = bound(StepShape(0, 0, chunk=chunk))
    return Bounds(chip.name, tuple(decode(mix) for mix in sessions), chunk, prompt.seconds)
