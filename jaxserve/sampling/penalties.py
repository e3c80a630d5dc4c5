"""Penalties for tokens that were there before."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxserve.sampling.arrays import IN_PROMPT, SamplingInput

__all__ = ["penalise"]


def penalise(logits: jax.Array, counts: jax.Array, params: SamplingInput) -> jax.Array:
    """Apply the three penalties to logits [P, V], given counts [P, V] (see ``RowState.counts``).

    Repetition (Keskar et al. 2019, arXiv:1909.05858): tokens of prompt or output, positive logits divided, negative
    ones multiplied, once however often they stand there. Frequency and presence (OpenAI): outputs only, subtracted per
    occurrence or once.
    """
    outputs = (counts & (IN_PROMPT - 1)).astype(jnp.float32)
    factor = jnp.where(counts != 0, params.repetition[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / factor, logits * factor)
    return logits - params.frequency[:, None] * outputs - params.presence[:, None] * (outputs > 0)
