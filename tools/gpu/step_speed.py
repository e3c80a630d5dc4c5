"""The runner's own programs on a Llama 8B with random weights: steps of decodes against their roofline.

One prompt is computed and its blocks are copied to blocks of every other row, so that all rows decode over memory of
their own and yet must say the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from cuda_aot.program import copies_of

from gpu.model import LLAMA_8B, TINY, random_params
from gpu.results import Result, Target
from gpu.session import Session, short
from gpu.timing import in_threads
from jaxserve.models.config import ModelConfig
from jaxserve.plan import DEVICE_TOKEN, BlockCopy, RowPlan, StepPlan
from jaxserve.roofline import Precision, StepShape, kv_token_bytes, step_bound, step_work
from jaxserve.runner import Runner, RunnerShape, StepHandle
from jaxserve.sampling_params import SamplingParams
from pallas_kernels.paged_attention import select_backend

__all__ = ["step_speed"]

_BLOCK_SIZE = 16
_SHARE = 75  # % of the roofline
_GREEDY = SamplingParams(temperature=0.0)
_TRIES = 3  # of the prompt's step; the last counts


class _Size(NamedTuple):
    """What is measured: decodes of ``context`` tokens in batches, ``steps`` steps each."""

    model: ModelConfig
    context: int
    batches: tuple[int, ...]
    steps: int

    @property
    def row_blocks(self) -> int:
        """Blocks of a row: its prompt, and what all measurements append to it."""
        return -(-(self.context + 2 * self.steps) // _BLOCK_SIZE)


_FULL = _Size(LLAMA_8B, 2048, (1, 32, 128), 32)
_DRY = _Size(TINY, 40, (2,), 4)


def step_speed(session: Session) -> Iterator[Result]:
    """Compile, fill the cache, and measure each batch."""
    size = _DRY if session.dry else _FULL
    runner = _make_runner(size)
    try:
        yield from _compile(session, runner, size)
        yield _prompt(session, runner, size)
        for batch in size.batches:
            yield from _decodes(session, runner, size, batch)
    finally:
        runner.close()


def _make_runner(size: _Size) -> Runner:
    rows = max(size.batches)
    backend, _ = select_backend("auto", head_dim=size.model.head_dim, dtype="bfloat16")
    shape = RunnerShape(
        num_blocks=rows * size.row_blocks + 1,
        block_size=_BLOCK_SIZE,
        max_context=size.row_blocks * _BLOCK_SIZE,
        max_tokens=max(size.context, rows),
        max_rows=rows,
        dtype=jnp.dtype("bfloat16"),
        backend=backend,
    )
    return Runner(random_params(size.model), size.model, shape)


def _compile(session: Session, runner: Runner, size: _Size) -> Iterator[Result]:
    """Compile what will be run, and see what becomes of the pools in the forward programs."""
    buckets = [
        runner.buckets.pick(size.context, 1, has_prefill=True),
        *(runner.buckets.pick(batch, batch, has_prefill=False) for batch in size.batches),
    ]
    wanted = {*buckets, *(runner.buckets.pick_places(batch) for batch in size.batches), "copy"}
    todo = {str(key): (programs, key) for programs, key in runner.programs() if key in wanted}
    began = time.perf_counter()
    # Tracing holds the interpreter's lock anyway.
    jobs = {name: partial(programs.compile, key, programs.lower(key)) for name, (programs, key) in todo.items()}
    for error in in_threads(jobs, session.threads).values():
        if isinstance(error, Exception):
            raise error
    note = f"attention by {runner.shape.backend}"
    yield Result(f"{len(jobs)} programs", {"s to compile": time.perf_counter() - began}, note=note)
    for bucket in (buckets[0], buckets[-1]):
        programs, _ = todo[str(bucket)]
        yield _pools(session, runner, programs[bucket], "a prompt" if bucket.has_prefill else "decodes")


def _pools(session: Session, runner: Runner, program: jax.stages.Compiled, what: str) -> Result:
    """Whether a forward program updates all of the pools in place; a CPU need not."""
    memory, shape, config = program.memory_analysis(), runner.shape, runner.config
    wanted = kv_token_bytes(config, Precision()) * shape.num_blocks * shape.block_size
    pool = f"bf16[{shape.num_blocks},{shape.block_size},{config.num_kv_heads},{config.head_dim}]"
    copies = copies_of(pool, program.as_text())
    in_place = memory.alias_size_in_bytes == wanted and not copies
    figures = {
        "% of the pools in place": 100 * memory.alias_size_in_bytes / wanted,
        "copies of a pool": float(len(copies)),
        "MiB of scratch": memory.temp_size_in_bytes / 2**20,
    }
    if session.dry:
        return Result(f"the pools in a step of {what}", figures)
    return Result(f"the pools in a step of {what}", figures, correct=in_place)


def _prompt(session: Session, runner: Runner, size: _Size) -> Result:
    """Compute row 0's prompt, then give every other row a copy of its blocks."""
    tokens = np.random.default_rng(0).integers(0, size.model.vocab_size, size.context).tolist()
    row = _row_plan(size, 0, 0, tokens, samples=False)
    seconds = 0.0
    for _ in range(_TRIES):
        began = time.perf_counter()
        runner.forward(StepPlan((row,)))
        runner.wait()
        seconds = time.perf_counter() - began
    filled = -(-size.context // _BLOCK_SIZE)
    copies = [
        BlockCopy(source, target)
        for other in range(1, max(size.batches))
        for source, target in zip(_blocks(size, 0)[:filled], _blocks(size, other)[:filled], strict=True)
    ]
    runner.forward(StepPlan(copies=tuple(copies)))
    runner.wait()
    bound = _bound(session, size, StepShape(decodes=0, chunk=size.context))
    figures = {"ms": 1e3 * seconds, "tok/s": size.context / seconds, "% of roofline": 100 * bound / seconds}
    return Result(f"a prompt of {size.context}", figures)


def _decodes(session: Session, runner: Runner, size: _Size, batch: int) -> Iterator[Result]:
    """Steps of a batch, first one after the other, then with one in flight, as the engine runs them."""
    what = f"{batch} decodes at {size.context}"
    try:
        plans = [_step_plan(size, batch, size.context + i, first=i == 0) for i in range(2 * size.steps)]
        alone, _, said = _run(runner, plans[: size.steps], in_flight=0)
        seconds, dispatch, more = _run(runner, plans[size.steps :], in_flight=1)
    except jax.errors.JaxRuntimeError as error:  # one batch that does not fit is no reason to lose the next
        yield Result(what, note=short(error))
        return
    bound = _bound(session, size, StepShape(decodes=batch, context=size.context + size.steps * 3 // 2))
    yield Result(
        what,
        {"ms": 1e3 * seconds, "tok/s": batch / seconds, "% of roofline": 100 * bound / seconds},
        (Target("% of roofline", least=_SHARE),),
    )
    yield Result(
        f"{what}: host and device",
        {
            "ms to dispatch": 1e3 * dispatch,
            "% of the step": 100 * dispatch / seconds,
            "ms without overlap": 1e3 * alone,
        },
        (Target("% of the step", most=100),),
    )
    agree = np.mean([[token == step[0] for token in step] for step in said + more])
    yield Result(f"{what}: equal rows", {"% that agree": 100 * float(agree)}, (Target("% that agree", least=100),))


def _run(runner: Runner, plans: Sequence[StepPlan], *, in_flight: int) -> tuple[float, float, list[list[int]]]:
    """Median seconds of a step, mean seconds of dispatching it, and the tokens of all steps."""
    waiting: list[StepHandle] = []
    said: list[list[int]] = []
    ends, dispatching = [], 0.0
    for plan in [*plans, None]:
        if plan is not None:
            began = time.perf_counter()
            waiting.append(runner.sample(runner.forward(plan), None))
            dispatching += time.perf_counter() - began
        while len(waiting) > (in_flight if plan is not None else 0):
            said.append([tokens[0] for tokens in waiting.pop(0).result().tokens])
            ends.append(time.perf_counter())
    return float(np.median(np.diff(ends))), dispatching / len(plans), said


def _step_plan(size: _Size, batch: int, position: int, *, first: bool) -> StepPlan:
    # The host knows the first token; the others are on the device only.
    token = 7 if first else DEVICE_TOKEN
    return StepPlan(tuple(_row_plan(size, row, position, [token]) for row in range(batch)))


def _row_plan(size: _Size, row: int, start: int, tokens: Sequence[int], *, samples: bool = True) -> RowPlan:
    return RowPlan(
        request_id=str(row),
        row=row,
        start=start,
        num_tokens=len(tokens),
        tokens=tuple(tokens),
        num_drafts=0,
        samples=samples,
        fresh=False,
        history=(),
        num_prompt=size.context,
        block_ids=tuple(_blocks(size, row)),
        params=_GREEDY,
        seed=0,
    )


def _blocks(size: _Size, row: int) -> list[int]:
    """Blocks of a row, scattered over the pools as those of a running server are."""
    rows = max(size.batches)
    return [1 + block * rows + (row + block * block) % rows for block in range(size.row_blocks)]


def _bound(session: Session, size: _Size, step: StepShape) -> float:
    """Seconds that a step takes at least, by the bandwidth that was measured."""
    return step_bound(step_work(size.model, step, Precision()), session.chip, "bfloat16").seconds
