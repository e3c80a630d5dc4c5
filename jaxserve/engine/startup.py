"""From a configuration to an engine that is ready: load, size, compile. Every phase is timed and logged."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from tqdm.auto import tqdm

from jaxserve.blocks import make_blocks
from jaxserve.config import EngineConfig
from jaxserve.engine.adapters import EngineAdapters, NoAdapters, open_adapters
from jaxserve.engine.drafts import OpenedDrafts, open_drafts
from jaxserve.engine.engine import Engine
from jaxserve.engine.input import InputProcessor
from jaxserve.engine.loading import load_weights
from jaxserve.engine.speculation import make_speculation, resolve
from jaxserve.errors import ConfigError, ShapeMismatchError
from jaxserve.logging import get_logger
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import state_size
from jaxserve.request import FinishReason
from jaxserve.runner import Runner, RunnerShape, check_room, fit_blocks, no_room, use_compilation_cache
from jaxserve.scheduler import Scheduler
from jaxserve.sizing import (
    activation_dtype,
    check_chunking,
    check_draft_context,
    fit_context,
    most_useful_blocks,
    step_limits,
)
from jaxserve.speculative import TypicalAcceptance
from jaxserve.tokenizer import Tokenizer, load_tokenizer
from jaxserve.weights import OpenedModel, open_model
from pallas_kernels.paged_attention import select_backend

__all__ = ["Started", "start"]

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Started:
    """A running engine and what stands around it."""

    config: EngineConfig
    engine: Engine
    tokenizer: Tokenizer
    model_config: ModelConfig
    model_name: str
    max_model_len: int
    phases: dict[str, float]
    adapters: EngineAdapters = field(default_factory=NoAdapters)

    def input_processor(self) -> InputProcessor:
        """What makes requests for this engine."""
        return InputProcessor(self.tokenizer, self.model_config, self.max_model_len, self.config.model.seed)


@dataclass(slots=True)
class _Phases:
    """Seconds per phase of the start, logged as they end."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - began
        _log.info("%s: %.2f s", name, self.seconds[name])


@dataclass(frozen=True, slots=True)
class _Device:
    """What was found out about the device side before the weights: KV dtype, attention backend, most tokens and rows
    of a step, what guesses, and the adapters."""

    dtype: jnp.dtype
    backend: str
    limits: tuple[int, int]
    drafts: OpenedDrafts
    adapters: EngineAdapters = field(default_factory=NoAdapters)


def start(config: EngineConfig, on_progress: Callable[[str, float], None] | None = None) -> Started:
    """Make an engine. ``on_progress`` is told what is being done and which share of it is done (0..1).

    Raises:
        LoadError: the model cannot be loaded.
        ConfigError: the configuration cannot work with this model or machine.
    """
    phase = _Phases()
    tell = on_progress or (lambda what, share: None)
    on_cpu = jax.default_backend() == "cpu"
    limits = step_limits(config.scheduler, on_cpu=on_cpu)
    if config.model.max_model_len is not None:  # found out before a weight is read, where it can be
        check_chunking(config.scheduler, limits[0], config.model.max_model_len)
    speculative = resolve(config.speculative, max_tokens=limits[0])
    use_compilation_cache(config.runner.compilation_cache_dir)
    tell("opening the model", 0.0)
    with phase("open"):
        opened = open_model(config.model)
        model = opened.config
        tokenizer = load_tokenizer(opened.tokenizer_path, opened.gguf_metadata, opened.chat_template)
        _check_vocabulary(tokenizer, model)
        drafts = open_drafts(speculative, config.model, tokenizer, model)
    tell("loading weights", 0.0)
    dtype = jnp.dtype(activation_dtype(config.model, model, on_cpu=on_cpu))
    backend = _select_backend(config, model, dtype, drafts)
    with phase("weights"):
        weights = load_weights(config.model, opened, dtype)
        params = (weights, drafts.load(dtype, weights))
    with phase("adapters"):
        adapters = open_adapters(config, model, dtype)
    with phase("kv cache"):
        runner = _make_runner(config, opened, params, _Device(dtype, backend, limits, drafts, adapters))
    if config.runner.warmup:
        with phase("compile"):
            _warm_up(runner, tell)
    scheduler = Scheduler(
        config.scheduler,
        make_blocks(config.cache, runner.shape.num_blocks, runner.shape.max_context),
        max_num_batched_tokens=runner.shape.max_tokens,
        max_num_seqs=runner.shape.max_rows,
        admission=adapters.admission(lambda request_id, why: engine.finish(request_id, FinishReason.ERROR, why)),
        speculation=make_speculation(drafts.settings, runner.buckets, runner.proposer),
    )
    engine = Engine(scheduler, runner, depth=1 if config.runner.async_scheduling else 0)
    return Started(config, engine, tokenizer, model, opened.name, runner.shape.max_context, phase.seconds, adapters)


def _make_runner(
    config: EngineConfig,
    opened: OpenedModel,
    params: tuple[dict[str, Any], Any],
    device: _Device,
) -> Runner:
    model, cache = opened.config, config.cache
    max_tokens, max_rows = device.limits
    most_useful = most_useful_blocks(model, config.model.max_model_len, max_rows, cache.block_size)
    draft = device.drafts.model
    others = () if draft is None else (draft,)
    kept = state_size(model, device.drafts.taps)
    size = fit_blocks(cache, model, device.dtype, most_useful=most_useful, others=others, state_size=kept)
    max_context = fit_context(size, cache, model, config.model.max_model_len)
    check_chunking(config.scheduler, max_tokens, max_context)
    _log.info(
        "%d KV blocks of %d tokens (%.0f MiB, by %s); contexts up to %d tokens",
        size.num_blocks,
        cache.block_size,
        size.num_bytes / 2**20,
        size.reason,
        max_context,
    )
    proposer = device.drafts.propose(device.dtype.name, device.backend)
    check_room(size, model, max_rows, proposer, max_context)
    if draft is not None:
        check_draft_context(draft, max_context)
    shape = RunnerShape(
        size.num_blocks, cache.block_size, max_context, max_tokens, max_rows, device.dtype, device.backend
    )
    with no_room(
        f"the device has no room for {size.num_blocks} KV blocks ({size.num_bytes / 2**20:.0f} "
        f"MiB, by {size.reason}) and the state of {max_rows} sequences. Lower "
        "--num-gpu-blocks-override, --kv-cache-memory-bytes, --gpu-memory-utilization or --max-num-seqs."
    ):
        typical, adapters = _typical(device.drafts), device.adapters.device
        runner = Runner(params[0], model, shape, proposer, params[1], typical, adapters)
        runner.wait()
    return runner


def _typical(drafts: OpenedDrafts) -> TypicalAcceptance | None:
    typical = drafts.settings.typical if drafts.settings is not None else None
    if typical is not None:
        _log.warning(
            "typical acceptance is lossy: what is sampled no longer follows the model's distribution, and depends on "
            "drafts; only at temperature 0 tokens are those of plain decoding"
        )
    return typical


def _select_backend(config: EngineConfig, model: ModelConfig, dtype: jnp.dtype, drafts: OpenedDrafts) -> str:
    narrowest = min((window for window in model.windows if window is not None), default=None)
    if drafts.is_tree and narrowest is not None and narrowest <= (drafts.max_depth or 0):
        raise ConfigError(
            f"--speculative-model: its trees are up to {drafts.max_depth} drafts deep, but the model has a window of "
            f"{narrowest} tokens, which must be more."
        )
    name = config.runner.attention_backend
    try:
        name, why = select_backend(name, head_dim=model.head_dim, dtype=dtype.name, tree=drafts.is_tree)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    _log.info("attention backend: %s (%s)", name, why)
    return name


def _check_vocabulary(tokenizer: Tokenizer, model: ModelConfig) -> None:
    if tokenizer.vocab_size > model.vocab_size:
        raise ShapeMismatchError(
            f"the tokenizer has {tokenizer.vocab_size} tokens but the model's embedding only {model.vocab_size}; they "
            "do not belong together."
        )


def _warm_up(runner: Runner, tell: Callable[[str, float], None]) -> None:
    """Compile every program, then let the compile counter watch.

    Tracing holds the interpreter's lock, so it is done here; compiling does not, and neither does reading a compiled
    program from the cache, so they go to as many threads as there are cores.
    """
    todo = runner.programs()
    _log.info("compiling %d programs: minutes the first time, seconds once they are in the cache", len(todo))
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        try:
            compiling = [pool.submit(programs.compile, key, programs.lower(key)) for programs, key in todo]
            finished = tqdm(as_completed(compiling), desc="compiling", unit="program", total=len(todo), disable=None)
            for done, program in enumerate(finished, start=1):
                program.result()
                tell("compiling", done / len(todo))
        except BaseException:  # ctrl-C above all: without this it would wait for every program
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    runner.compiles.armed = True
