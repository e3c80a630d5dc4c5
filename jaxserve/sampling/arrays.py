"""Sampling parameters of a step's rows as arrays, and the per-row state that stays on the device.

Letters: R sampling rows of the step, X rows of the device state (the last one is a dummy for padding), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from numpy.typing import NDArray

from jaxserve.plan import RowPlan
from jaxserve.sampling_params import SamplingParams

__all__ = ["IN_PROMPT", "RowState", "SamplingInput", "history_counts", "make_sampling_input"]

IN_PROMPT = np.int16(1 << 14)
"""Bit of a token count that says that the token stands in the prompt; the bits below count outputs, up to all ones."""

_NEUTRAL = SamplingParams(temperature=0.0)


@struct.dataclass
class RowState:
    """What the device remembers of each row between steps.

    Attributes:
        last_token: [X] int32, the newest sampled token.
        counts: [X, V] int16, how often each token stands in the output, with IN_PROMPT; kept for penalised rows only.
        bias: [X, V] float32, added to the logits; kept for rows with a logit_bias only.
    """

    last_token: jax.Array
    counts: jax.Array
    bias: jax.Array

    @classmethod
    def zeros(cls, num_rows: int, vocab_size: int) -> RowState:
        """State of num_rows rows and the dummy."""
        shape = (num_rows + 1, vocab_size)
        return cls(
            last_token=jnp.zeros(num_rows + 1, jnp.int32),
            counts=jnp.zeros(shape, jnp.int16),
            bias=jnp.zeros(shape, jnp.float32),
        )


@struct.dataclass
class SamplingInput:
    """How each sampling row of a step is sampled; numpy on the way in, [R] each unless noted.

    Attributes:
        rows: int32, index in the row state (the dummy for padding).
        positions: int32, position of the token to sample: with the seed it determines the noise.
        seeds: [R, 2] uint32, halves of the 64-bit seed.
        temperature, top_p, min_p, presence, frequency, repetition: float32.
        top_k: int32, V or more for off.
        biased: bool, whether the row's bias counts.
        num_logprobs: int32, how many of the likeliest tokens to report; 0 for the sampled one only, -1 for none.
    """

    rows: Any
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


def make_sampling_input(plans: Sequence[RowPlan], size: int, dummy_row: int) -> SamplingInput:
    """Arrays of ``size`` rows from the sampling rows of a plan; the rest is greedy on the dummy row."""
    params = [p.params for p in plans] + [_NEUTRAL] * (size - len(plans))
    seeds = np.array([p.seed & (2**64 - 1) for p in plans] + [0] * (size - len(plans)), np.uint64)

    def floats(name: str) -> NDArray[np.float32]:
        return np.array([getattr(p, name) for p in params], np.float32)

    return SamplingInput(
        rows=np.array([p.row for p in plans] + [dummy_row] * (size - len(plans)), np.int32),
        positions=np.array([p.start + p.num_tokens for p in plans] + [0] * (size - len(plans)), np.int32),
        seeds=np.stack([seeds >> np.uint64(32), seeds & np.uint64(0xFFFFFFFF)], axis=-1).astype(np.uint32),
        temperature=floats("temperature"),
        top_k=np.array([p.top_k if p.top_k > 0 else 2**31 - 1 for p in params], np.int32),
        top_p=floats("top_p"),
        min_p=floats("min_p"),
        presence=floats("presence_penalty"),
        frequency=floats("frequency_penalty"),
        repetition=floats("repetition_penalty"),
        biased=np.array([bool(p.logit_bias) for p in params]),
        num_logprobs=np.array([-1 if p.logprobs is None else p.logprobs for p in params], np.int32),
    )


def history_counts(plan: RowPlan, vocab_size: int) -> NDArray[np.int16]:
    """The row of ``RowState.counts`` [V] for a fresh row: what its history holds so far."""
    outputs = np.bincount(np.asarray(plan.history[plan.num_prompt :], np.int64), minlength=vocab_size)
    counts = np.minimum(outputs, IN_PROMPT - 1).astype(np.int16)
    counts[np.unique(np.asarray(plan.history[: plan.num_prompt], np.int64))] |= IN_PROMPT
    return counts
