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
from jaxserve.config import EngineConfig, ModelOptions, SchedulerConfig
from jaxserve.engine.engine import Engine
from jaxserve.engine.input import InputProcessor
from jaxserve.errors import ConfigError, ShapeMismatchError
from jaxserve.logging import get_logger
from jaxserve.models.config import ModelConfig
from jaxserve.quantization import KEPT_KINDS, WeightForm, describe, has_quantised
from jaxserve.runner import Runner, RunnerShape, check_room, fit_blocks, fit_context, use_compilation_cache
from jaxserve.scheduler import Scheduler
from jaxserve.tokenizer import Tokenizer, load_tokenizer
from jaxserve.weights import OpenedModel, open_model
from pallas_kernels.packed_matmul import select_backend as select_packed_backend
from pallas_kernels.paged_attention import select_backend

__all__ = ["Started", "start"]

_log = get_logger(__name__)
_CPU_LIMITS = (256, 64)  # max_num_batched_tokens, max_num_seqs
_ACCELERATOR_LIMITS = (2048, 256)


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


def start(config: EngineConfig, on_progress: Callable[[str, float], None] | None = None) -> Started:
    """Make an engine. ``on_progress`` is told what is being done and which share of it is done (0..1).

    Raises:
        LoadError: the model cannot be loaded.
        ConfigError: the configuration cannot work with this model or machine.
    """
    phase = _Phases()
    tell = on_progress or (lambda what, share: None)
    limits = _limits(config.scheduler)
    if config.model.max_model_len is not None:  # found out before a weight is read, where it can be
        _check_chunking(config.scheduler, limits[0], config.model.max_model_len)
    use_compilation_cache(config.runner.compilation_cache_dir)
    tell("opening the model", 0.0)
    with phase("open"):
        opened = open_model(config.model)
        model = opened.config
        tokenizer = load_tokenizer(opened.tokenizer_path, opened.gguf_metadata, opened.chat_template)
        _check_vocabulary(tokenizer, model)
    tell("loading weights", 0.0)
    dtype = _dtype(config, model)
    backend = _select_backend(config, model, dtype)
    form = _weight_form(config.model, opened)
    with phase("weights"):
        params = opened.load(dtype, form=form)
    if form.activation_bits == 8 and not has_quantised(params):
        raise ConfigError(
            f"--activation-quantization int8 needs quantised weights, and --quantization {form.quantization} found no "
            f"matrix of {opened.name} that it could quantise. Leave it at none."
        )
    _log.info("weights in memory: %s", describe(params))
    with phase("kv cache"):
        runner = _make_runner(config, opened, params, dtype, backend, limits)
    if config.runner.warmup:
        with phase("compile"):
            _warm_up(runner, tell)
    scheduler = Scheduler(
        config.scheduler,
        make_blocks(config.cache, runner.shape.num_blocks, runner.shape.max_context),
        max_num_batched_tokens=runner.shape.max_tokens,
        max_num_seqs=runner.shape.max_rows,
    )
    engine = Engine(scheduler, runner, depth=1 if config.runner.async_scheduling else 0)
    return Started(config, engine, tokenizer, model, opened.name, runner.shape.max_context, phase.seconds)


def _make_runner(
    config: EngineConfig,
    opened: OpenedModel,
    params: dict[str, Any],
    dtype: jnp.dtype,
    backend: str,
    limits: tuple[int, int],
) -> Runner:
    model, cache = opened.config, config.cache
    max_tokens, max_rows = limits
    longest = config.model.max_model_len or model.max_position
    most_useful = max_rows * -(-longest // cache.block_size) + 1
    size = fit_blocks(cache, model, dtype, most_useful=most_useful)
    max_context = fit_context(size, cache, model, config.model.max_model_len)
    _check_chunking(config.scheduler, max_tokens, max_context)
    _log.info(
        "%d KV blocks of %d tokens (%.0f MiB, by %s); contexts up to %d tokens",
        size.num_blocks,
        cache.block_size,
        size.num_blocks * size.block_bytes / 2**20,
        size.reason,
        max_context,
    )
    check_room(size, model, max_rows)
    shape = RunnerShape(size.num_blocks, cache.block_size, max_context, max_tokens, max_rows, dtype, backend)
    try:
        runner = Runner(params, model, shape)
        runner.wait()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ConfigError(
            f"the device has no room for {size.num_blocks} KV blocks ({size.num_blocks * size.block_bytes / 2**20:.0f} "
            f"MiB, by {size.reason}) and the state of {max_rows} sequences. Lower "
            "--num-gpu-blocks-override, --kv-cache-memory-bytes, --gpu-memory-utilization or --max-num-seqs."
        ) from error
    return runner


def _limits(config: SchedulerConfig) -> tuple[int, int]:
    """Most tokens and rows of a step: as asked, or what suits the device."""
    tokens, rows = _CPU_LIMITS if jax.default_backend() == "cpu" else _ACCELERATOR_LIMITS
    rows = config.max_num_seqs or rows
    tokens = config.max_num_batched_tokens or max(tokens, rows)
    if tokens < rows:
        raise ConfigError(
            f"--max-num-batched-tokens ({tokens}) must not be less than --max-num-seqs ({rows}): each sequence takes a "
            "token per step."
        )
    return tokens, rows


def _check_chunking(config: SchedulerConfig, max_tokens: int, max_context: int) -> None:
    if not config.enable_chunked_prefill and max_tokens < max_context:
        raise ConfigError(
            f"without chunked prefill a prompt must fit into one step: --max-num-batched-tokens is {max_tokens}, but "
            f"contexts reach {max_context} tokens. Raise it, or set --max-model-len {max_tokens} or less."
        )


def _dtype(config: EngineConfig, model: ModelConfig) -> jnp.dtype:
    name = config.model.dtype
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else model.checkpoint_dtype
    return jnp.dtype(name)


def _weight_form(options: ModelOptions, opened: OpenedModel) -> WeightForm:
    """Which leaves the weights become. Without a native kernel they are plain, unless something else is asked for."""
    asked = options.quantization
    activation_bits = 8 if options.activation_quantization == "int8" else 16
    backend, why = select_packed_backend("auto", activation_bits=activation_bits)
    if activation_bits == 8 and jax.default_backend() != "cpu":
        raise ConfigError(
            "--activation-quantization int8 is made for the CPU's native kernels, and the device is "
            f"{jax.default_backend()}: there every product would unpack its whole weight. Leave it at none."
        )
    native = backend == "cpu"  # on GPUs only quantised weights are packed, and only if that is asked for
    if asked == "gguf" and not (opened.kept_kinds or opened.has_random_weights):
        raise ConfigError(
            f"--quantization gguf keeps the blocks of a quantised GGUF file, but no matrix of {opened.name} is of a "
            f"kind that can be kept ({', '.join(KEPT_KINDS)}). Use auto, none or int8."
        )
    if asked == "auto":
        asked = "gguf" if native and opened.kept_kinds else "none"
    form = WeightForm(asked, packed=native, backend=backend, activation_bits=activation_bits)
    if activation_bits == 8 and not form.is_quantised:
        raise ConfigError(
            "--activation-quantization int8 needs quantised weights, and those of this model are floats: add "
            "--quantization int8 or, for a quantised GGUF file, --quantization gguf"
        )
    if native or (form.is_quantised and backend != "reference"):
        _log.info("products with packed weights: %s (%s)", backend, why)
    elif form.is_quantised:
        _log.warning(
            "--quantization %s saves memory here but no time: without a native kernel for %s every product unpacks its "
            "whole weight, which is slow",
            asked,
            jax.default_backend(),
        )
    return form


def _select_backend(config: EngineConfig, model: ModelConfig, dtype: jnp.dtype) -> str:
    try:
        name, why = select_backend(config.runner.attention_backend, head_dim=model.head_dim, dtype=dtype.name)
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
