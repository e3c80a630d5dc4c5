"""Sampling parameters of a step as arrays, and the per-row state that stays on the device.

A step samples at places: the one after a row's newest token, and with drafts the one after each of these.

Letters: P places, X rows of the device state (the last one is a dummy for padding), V vocabulary, C context, D most
drafts on a path.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from numpy.typing import NDArray

from jaxserve.plan import DEVICE_TOKEN, RowPlan
from jaxserve.sampling_params import SamplingParams
from jaxserve.sizing import row_arrays

__all__ = [
    "IN_PROMPT",
    "MOST_COUNTED",
    "RowState",
    "SamplingInput",
    "history_counts",
    "make_sampling_input",
    "split_seeds",
]

IN_PROMPT = np.int16(1 << 14)
"""Bit of a token count that says that the token stands in the prompt; the bits below count outputs, up to all ones."""

MOST_COUNTED = IN_PROMPT - 256
"""Most outputs that are counted: as many as one step adds to them can never reach the bit."""

_NEUTRAL = SamplingParams(temperature=0.0)


@struct.dataclass
class RowState:
    """What the device remembers of each row between steps.

    Attributes:
        last_token: [X] int32, the newest sampled token.
        length: [X] int32, number of tokens, that one included.
        history: [X, C] int32, all of them; C is 0 where nobody reads it.
        path: [X, 1 + D] int32, places of the newest step on the row's path of right drafts, the newest token's first.
        path_length: [X] int32, how many these are: as many tokens were sampled.
        counts: [X, V] int16, how often each token stands in the output, with IN_PROMPT; kept for penalised rows only.
        bias: [X, V] float32, added to the logits; kept for rows with a logit_bias only.
    """

    last_token: jax.Array
    length: jax.Array
    history: jax.Array
    path: jax.Array
    path_length: jax.Array
    counts: jax.Array
    bias: jax.Array

    @classmethod
    def zeros(cls, num_rows: int, vocab_size: int, history: int = 0, max_depth: int = 0) -> RowState:
        """State of num_rows rows and the dummy; ``history`` is C, ``max_depth`` D."""
        shapes = row_arrays(num_rows, vocab_size, history, max_depth).items()
        arrays = {name: jnp.zeros(shape, dtype) for name, (shape, dtype) in shapes}
        return cls(**arrays | {"path_length": jnp.ones_like(arrays["path_length"])})

    def record(
        self,
        params: SamplingInput,
        tokens: jax.Array,
        positions: jax.Array,
        depth: jax.Array,
        kept: jax.Array,
        newest: jax.Array,
    ) -> RowState:
        """Note what was sampled: tokens [P] at positions [P], after depth [P] drafts.

        Those of kept [P] count, and newest [P] are the last of their rows.
        """
        nowhere = self.last_token.shape[0]
        ends, rows = jnp.where(newest, params.rows, nowhere), jnp.where(kept, params.rows, nowhere)
        places = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        return replace(
            self,
            last_token=self.last_token.at[ends].set(tokens, mode="drop"),
            length=self.length.at[ends].set(positions + 1, mode="drop"),
            history=self.history.at[rows, positions].set(tokens, mode="drop"),
            path=self.path.at[rows, depth].set(places, mode="drop"),
            path_length=self.path_length.at[ends].set(depth + 1, mode="drop"),
            counts=self._count(params, tokens, kept),
        )

    def _count(self, params: SamplingInput, tokens: jax.Array, kept: jax.Array) -> jax.Array:
        """Adds nothing, in place, where it is not wanted: a condition would copy the counts of the whole vocabulary."""
        full = self.counts[params.rows, tokens] & (IN_PROMPT - 1) >= MOST_COUNTED
        adds = kept & ~full & params.penalised.any()
        return self.counts.at[params.rows, tokens].add(jnp.where(adds, 1, 0).astype(jnp.int16))


@struct.dataclass
class SamplingInput:
    """How each place of a step is sampled; numpy on the way in, [P] each unless noted.

    Attributes:
        rows: int32, index in the row state (the dummy for padding).
        nodes: int32, which of the row's drafts the place follows, from 1; 0 for its newest token.
        positions: int32, position of the token after the row's newest, -1 where only the device knows it.
        seeds: [P, 2] uint32, halves of the 64-bit seed: with its position it determines a token's noise.
        temperature, top_p, min_p, presence, frequency, repetition: float32.
        top_k: int32, V or more for off.
        biased: bool, whether the row's bias counts.
        num_logprobs: int32, how many of the likeliest tokens to report; 0 for the sampled one only, -1 for none.
        processed: bool, whether log probabilities are those after penalties, temperature and filters.
    """

    rows: Any
    nodes: Any
    positions: Any
    seeds: Any
    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    presence: Any
    frequency: Any
    repetition: Any
    biased: Any
    num_logprobs: Any
    processed: Any

    @property
    def penalised(self) -> Any:
        """[P] bool, whether any penalty is on."""
        return (self.presence != 0) | (self.frequency != 0) | (self.repetition != 1)


def make_sampling_input(plans: Sequence[RowPlan], size: int, dummy_row: int) -> SamplingInput:
    """Arrays of ``size`` places from the sampling rows of a plan; the rest is greedy on the dummy row."""
    places = [1 + p.num_drafts for p in plans]
    padding = size - sum(places)
    repeats = [*places, padding]
    params = [*(p.params for p in plans), _NEUTRAL]
    seeds = np.array([*(p.seed & (2**64 - 1) for p in plans), 0], np.uint64).repeat(repeats)

    def array(values: Iterable[Any], dtype: type) -> NDArray[Any]:
        return np.array(list(values), dtype).repeat(repeats)

    def floats(name: str) -> NDArray[np.float32]:
        return array((getattr(p, name) for p in params), np.float32)

    return SamplingInput(
        rows=array([*(p.row for p in plans), dummy_row], np.int32),
        nodes=np.concatenate([*(np.arange(count, dtype=np.int32) for count in places), np.zeros(padding, np.int32)]),
        positions=array([*(_position(p) for p in plans), 0], np.int32),
        seeds=split_seeds(seeds),
        temperature=floats("temperature"),
        top_k=array((p.top_k if p.top_k > 0 else 2**31 - 1 for p in params), np.int32),
        top_p=floats("top_p"),
        min_p=floats("min_p"),
        presence=floats("presence_penalty"),
        frequency=floats("frequency_penalty"),
        repetition=floats("repetition_penalty"),
        biased=array((bool(p.logit_bias) for p in params), np.bool_),
        num_logprobs=array((-1 if p.logprobs is None else p.logprobs for p in params), np.int32),
        processed=array((p.logprobs_mode == "processed_logprobs" for p in params), np.bool_),
    )


def split_seeds(seeds: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """The halves [N, 2] of 64-bit seeds [N]."""
    return np.stack([seeds >> np.uint64(32), seeds & np.uint64(0xFFFFFFFF)], axis=-1).astype(np.uint32)


def _position(plan: RowPlan) -> int:
    """Position of the token that follows the row's newest, -1 if that is not settled."""
    return -1 if plan.tokens[-1] == DEVICE_TOKEN else plan.start + len(plan.tokens)


def history_counts(plan: RowPlan, vocab_size: int) -> NDArray[np.int16]:
    """The row of ``RowState.counts`` [V] for a fresh row: what its history holds so far."""
    outputs = np.bincount(np.asarray(plan.history[plan.num_prompt :], np.int64), minlength=vocab_size)
    counts = np.minimum(outputs, MOST_COUNTED).astype(np.int16)
    counts[np.unique(np.asarray(plan.history[: plan.num_prompt], np.int64))] |= IN_PROMPT
    return counts
