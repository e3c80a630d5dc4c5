"""A tiny real engine, and the comparison of its answers.

The model is small and random, everything else is what serves: scheduler, block pool, compiled programs, sampler. Only
a third of the step sizes is there, since most of a test's time goes to compiling.
Programs of different shapes may round differently, so where two runs part, the two candidates' logits decide: a
difference below ``TIE`` is a tie, anything above is a fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.blocks import make_blocks
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.engine import Engine
from jaxserve.layers import KVCache
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import logits
from jaxserve.plan import NO_DRAFTS, RowPlan
from jaxserve.request import FinishReason, Request
from jaxserve.runner import Adapters, Runner, RunnerShape
from jaxserve.runner.batch import make_step_input
from jaxserve.runner.buckets import Bucket, Buckets
from jaxserve.runner.programs import Newest, forward
from jaxserve.sampling import history_counts, make_sampling_input
from jaxserve.sampling.filters import keep_likely
from jaxserve.sampling.penalties import penalise
from jaxserve.sampling.sampler import noise
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler import AdapterSlots, FixedSpeculation, Scheduler
from jaxserve.speculative import DraftState, EagleProposer, MedusaProposer, Proposer, TypicalAcceptance
from jaxserve.structured import step_mask
from pallas_kernels.paged_attention import select_backend

__all__ = [
    "BACKEND",
    "MODEL",
    "TIE",
    "Ask",
    "Comparison",
    "build",
    "params",
    "run",
    "shared_runner",
    "token_probabilities",
]

TIE = 1e-4
CONTEXT = 96
_POOL, _STEP, _ROWS = 200, 32, 8
"""Of the runner that most tests share: blocks, and the most tokens and rows of a step."""

BACKEND = select_backend("auto", head_dim=16, dtype="float32", tree=True)[0]
"""Native attention where there is some: its programs compile ten times faster than the reference's."""

MODEL = ModelConfig(
    family="llama",
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position=CONTEXT,
    tie_embeddings=False,
    windows=(None, 24),
    rope_layers=(True, True),
)


@cache
def params(m: ModelConfig = MODEL) -> dict[str, Any]:
    """Random weights whose logits spread over several units."""
    rng = np.random.default_rng(21)

    def normal(*shape: int, scale: float = 0.35) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape) * scale, jnp.float32)

    layer = lambda: {  # noqa: E731
        "input_norm": jnp.ones(m.hidden_size),
        "qkv": normal(m.hidden_size, m.qkv_size),
        "o": normal(m.num_heads * m.head_dim, m.hidden_size),
        "post_norm": jnp.ones(m.hidden_size),
        "gate_up": normal(m.hidden_size, 2 * m.intermediate_size),
        "down": normal(m.intermediate_size, m.hidden_size),
    }
    return {
        "embed": normal(m.vocab_size, m.hidden_size, scale=1.0),
        "layers": [layer() for _ in range(m.num_layers)],
        "final_norm": jnp.ones(m.hidden_size),
        "lm_head": normal(m.vocab_size, m.hidden_size),
    }


@cache
def medusa_params(m: ModelConfig = MODEL) -> dict[str, Any]:
    """Three random Medusa heads that know tokens 3 to 14."""
    rng = np.random.default_rng(12)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape) * 0.2, jnp.float32)

    heads = [
        {
            "blocks": [{"weight": normal(m.hidden_size, m.hidden_size), "bias": normal(m.hidden_size)}],
            "out": normal(12, m.hidden_size),
        }
        for _ in range(3)
    ]
    return {"heads": heads, "vocabulary": jnp.arange(3, 15, dtype=jnp.int32)}


@dataclass(frozen=True)
class Ask:
    """A request, as data."""

    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int = 5
    stop_ids: frozenset[int] = frozenset()
    salt: str | None = None
    constraint: Any = None  # makes one
    adapter: bytes | None = None  # a key of tests.equivalence.adapted

    def requests(self, name: str) -> list[Request]:
        """The engine requests: one, or n that share the prompt."""
        made: list[Request] = []
        for i in range(self.params.n):
            made.append(
                Request(
                    id=f"{name}.{i}",
                    prompt=list(self.prompt),
                    params=self.params,
                    seed=self.seed + i,
                    stop_ids=self.stop_ids,
                    max_total=min(CONTEXT, len(self.prompt) + (self.params.max_tokens or CONTEXT)),
                    fork_of=made[0] if made else None,
                    cache_salt=self.salt,
                    adapter=self.adapter,
                    constraint=self.constraint() if self.constraint else None,
                )
            )
        return made


class _SharedRunner(Runner):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for name in ("rows", "places", "mixed_tokens"):
            setattr(self.buckets, name, getattr(self.buckets, name)[::-3][::-1])

    def close(self) -> None:
        """Do nothing: the engines of other tests have it too."""


@cache
def shared_runner(
    num_blocks: int,
    block_size: int,
    max_tokens: int,
    max_rows: int,
    proposer: Proposer | None = None,
    model: ModelConfig = MODEL,
    backend: str = BACKEND,
    typical: TypicalAcceptance | None = None,
    num_slots: int = 0,
    merged: bytes | None = None,
) -> Runner:
    """A runner, with its compiled programs, for all engines that step within this shape."""
    shape = RunnerShape(num_blocks, block_size, CONTEXT, max_tokens, max_rows, jnp.dtype("float32"), backend)
    drafting = params(model) if proposer and proposer.has_cache else None
    if isinstance(proposer, MedusaProposer):
        drafting = medusa_params(model)
    if isinstance(proposer, EagleProposer):
        from tests.equivalence.heads import proposer_params

        drafting = proposer_params(proposer.head)
    adapters = None
    if num_slots:
        from tests.equivalence.adapted import LAYOUT

        adapters = Adapters(LAYOUT, num_slots)
    return _SharedRunner(_weights(model, merged), model, shape, proposer, drafting, typical, adapters)


def _weights(model: ModelConfig, merged: bytes | None) -> dict[str, Any]:
    if merged is None:
        return params(model)
    from tests.equivalence.adapted import merged_params

    return merged_params(merged)


def build(
    *,
    num_blocks: int = _POOL,
    block_size: int = 4,
    max_tokens: int = _STEP,
    max_rows: int = _ROWS,
    exact: bool = False,
    prefix: bool = True,
    kv_reservation: str = "paged",
    overlap: bool = True,
    proposer: Proposer | None = None,
    model: ModelConfig = MODEL,
    backend: str = BACKEND,
    typical: TypicalAcceptance | None = None,
    num_slots: int = 0,
    merged: bytes | None = None,
    **scheduler: Any,
) -> Engine:
    """An engine with an empty pool; runners (and their compiled programs) are shared between engines of one shape.

    Smaller sizes than usual are the scheduler's alone, and the programs stay the same, unless ``exact`` ones are asked
    for. All drafts that a ``proposer`` makes are verified.
    """
    sizes = (max_tokens, max_rows) if exact else (max(max_tokens, _STEP), max(max_rows, _ROWS))
    runner = shared_runner(
        max(num_blocks, _POOL), block_size, *sizes, proposer, model, backend, typical, num_slots, merged
    )
    cache = CacheConfig(block_size=block_size, enable_prefix_caching=prefix, kv_reservation=kv_reservation)
    blocks = make_blocks(cache, num_blocks, CONTEXT)
    queue = Scheduler(
        SchedulerConfig(**scheduler),
        blocks,
        max_num_batched_tokens=max_tokens,
        max_num_seqs=max_rows,
        speculation=FixedSpeculation(proposer.num_drafts, proposer.lookahead, max_depth=proposer.max_depth)
        if proposer
        else None,
        admission=_slots(runner, num_slots) if num_slots else (),
    )
    return Engine(queue, runner, depth=1 if overlap else 0)


def _slots(runner: Runner, num_slots: int) -> Sequence[AdapterSlots]:
    from tests.equivalence.adapted import Shelf

    def refuse(request_id: str, reason: str) -> None:
        raise AssertionError(f"{request_id}: {reason}")

    return (AdapterSlots(num_slots, Shelf(), place=runner.adapters.place, refuse=refuse),)


def run(engine: Engine, asks: Mapping[str, Ask], *, arrivals: Mapping[str, int] | None = None) -> dict[str, list[int]]:
    """Serve asks to the end (each entering at its step of ``arrivals``); tokens by engine request id.

    Afterwards nothing may be left: no request, no block in use.
    """
    waiting = sorted(asks, key=lambda name: (arrivals or {}).get(name, 0))
    tokens: dict[str, list[int]] = {f"{name}.{i}": [] for name, ask in asks.items() for i in range(ask.params.n)}
    finished: dict[str, FinishReason] = {}
    step = 0
    while waiting or engine.has_work:
        while waiting and (arrivals or {}).get(waiting[0], 0) <= step:
            name = waiting.pop(0)
            engine.add(asks[name].requests(name))
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
            if event.finish is not None:
                assert event.request_id not in finished, "a request ends once"
                finished[event.request_id] = event.finish
        step += 1
        assert step < 20_000, "the engine makes no progress"
    assert finished.keys() == tokens.keys()
    assert not any(reason is FinishReason.ERROR for reason in finished.values())
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks, "blocks are leaked"
    return tokens


@dataclass
class Comparison:
    """Compares answers with expected ones, and counts ties."""

    tokens: int = 0
    ties: list[float] = field(default_factory=list)
    model: ModelConfig = MODEL

    def same(self, ask: Ask, index: int, got: list[int], expected: list[int]) -> None:
        """Assert that both answers are equal, or part at a tie."""
        self.tokens += len(expected)
        parted = next((i for i, pair in enumerate(zip(got, expected, strict=False)) if pair[0] != pair[1]), None)
        if parted is None:
            assert len(got) == len(expected)
            return
        scores = _scores(ask, index, expected[:parted], self.model)
        gap = abs(float(scores[got[parted]] - scores[expected[parted]]))
        assert gap < TIE, f"tokens differ at {parted} with logits {gap:.2e} apart: {got} != {expected}"
        self.ties.append(gap)


def token_probabilities(ask: Ask, output: Iterable[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Probability [V] of each next token after these output tokens."""
    scores = _scores(ask, 0, output, noisy=False).astype(np.float64)
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def _scores(
    ask: Ask, index: int, output: Iterable[int], model: ModelConfig = MODEL, *, noisy: bool = True
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """What the argmax is taken of after these output tokens: changed logits, with noise where it is sampled."""
    tokens = (*ask.prompt, *output)
    num_prompt = len(ask.prompt)
    blocks = tuple(range(1, CONTEXT + 1))
    seed = ask.seed + index
    row = RowPlan("x", 0, 0, len(tokens), tokens, 0, True, True, tokens, num_prompt, blocks, ask.params, seed)
    step = make_step_input([row], _WHOLE, max_blocks=CONTEXT, buckets=Buckets(CONTEXT, 1))
    cache = KVCache.zeros(model.num_layers, (CONTEXT + 1, 1, model.num_kv_heads, model.head_dim), jnp.dtype("float32"))
    nobody = jnp.zeros(2, jnp.int32)
    weights = _weights(model, ask.adapter)
    _, hidden, _ = _dense(model)(weights, cache, Newest(nobody, nobody, DraftState.empty(1, 0)), step)
    arrays = make_sampling_input([row], 1, 1)
    scores = penalise(logits(weights, hidden), history_counts(row, MODEL.vocab_size)[None], arrays)
    for token, value in ask.params.logit_bias.items():
        scores = scores.at[0, token].add(value)
    if ask.constraint is not None:
        constraint = ask.constraint()
        constraint.advance(tuple(output))
        mask = step_mask([(constraint, 0, NO_DRAFTS)], MODEL.vocab_size)
        legal = np.unpackbits(mask.astype("<u4").view(np.uint8), bitorder="little")[: MODEL.vocab_size]
        scores = jnp.where(legal == 1, scores, -jnp.inf)
    if not ask.params.greedy:
        scores = keep_likely(scores / ask.params.temperature, arrays)
        if noisy:
            scores += noise(arrays.seeds, arrays.positions, MODEL.vocab_size)
    return np.asarray(scores)[0]


_WHOLE = Bucket(CONTEXT, 1, has_prefill=True)


@cache
def _dense(model: ModelConfig) -> Callable[..., Any]:
    return jax.jit(partial(forward, config=model, bucket=_WHOLE, max_places=1, backend="reference"))
