"""The pure device functions of a step: ``forward``, ``sample``, and two small ones for rare work.

They are compiled once per bucket (see ``compiled``) and hold no state; what they change comes in donated and goes out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.layers import KVCache
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import DecoderInput, decode, logits
from jaxserve.runner.batch import StepInput
from jaxserve.sampling import RowState, Sampled, SamplingInput
from jaxserve.sampling import sample as sample_logits
from pallas_kernels.paged_attention import make_plan

__all__ = ["copy_blocks", "decoder_input", "forward", "load_row", "sample"]


def forward(
    params: dict[str, Any],
    kv: KVCache,
    last_token: jax.Array,
    step: StepInput,
    *,
    config: ModelConfig,
    has_prefill: bool,
    max_rows: int,
    backend: str,
) -> tuple[KVCache, jax.Array]:
    """Run the decoder over a step's tokens.

    Returns the updated cache and the hidden state of each row's last token, [max_rows, E] in every bucket, so that the
    sample programs need not exist once per forward bucket.
    """
    inputs = decoder_input(step, last_token, kv, has_prefill=has_prefill)
    hidden, kv = decode(params, config, inputs, kv, backend=backend)
    last = hidden[jnp.maximum(step.query_start[1:] - 1, 0)]
    return kv, jnp.zeros((max_rows, hidden.shape[1]), hidden.dtype).at[: last.shape[0]].set(last)


def decoder_input(step: StepInput, last_token: jax.Array, kv: KVCache, *, has_prefill: bool) -> DecoderInput:
    """Tokens, positions and slots of a step, and its attention plan.

    last_token [X] fills in the tokens whose ids only the device knows.
    """
    num_tokens = step.tokens.shape[0]
    tokens = jnp.where(step.tokens < 0, last_token[step.rows[step.token_rows]], step.tokens)
    at = jnp.arange(num_tokens, dtype=jnp.int32)
    positions = step.start[step.token_rows] + at - step.query_start[step.token_rows]
    blocks = step.block_tables[step.token_rows, positions // kv.block_size]
    # Distinct out-of-range slots for padding: the scatter is told that its indices are unique.
    slots = blocks * kv.block_size + positions % kv.block_size
    slots = jnp.where(at < step.num_tokens, slots, kv.num_slots + at)
    plan = make_plan(
        step.query_start,
        step.start + step.query_start[1:] - step.query_start[:-1],
        step.block_tables,
        step.num_decode,
        num_tokens=num_tokens,
        has_prefill=has_prefill,
    )
    return DecoderInput(tokens, positions, slots, plan)


def sample(
    params: dict[str, Any],
    rows: RowState,
    hidden: jax.Array,
    at: jax.Array,
    sampling: SamplingInput,
    mask: jax.Array,
    masked: jax.Array,
) -> tuple[RowState, Sampled]:
    """Sample from rows at [R] of hidden [max_rows, E]; the other arguments are those of ``sampling.sample``."""
    sampled, rows = sample_logits(logits(params, hidden[at]), rows, sampling, mask, masked)
    return rows, sampled


def load_row(rows: RowState, row: jax.Array, counts: jax.Array, bias: jax.Array) -> RowState:
    """Set counts [V] and bias [V] of one row, for a request that was just given it."""
    return replace(rows, counts=rows.counts.at[row].set(counts), bias=rows.bias.at[row].set(bias))


def copy_blocks(kv: KVCache, source: jax.Array, target: jax.Array) -> KVCache:
    """Copy blocks source [C] over blocks target [C] in all layers."""
    return kv.copy(source, target)
