"""Logits of every position, by the decoder that serves, over a paged cache with its blocks in disorder."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxserve.layers import KVCache
from jaxserve.models import ModelConfig
from jaxserve.models.decoder import decode, logits
from jaxserve.plan import RowPlan
from jaxserve.runner.batch import StepInput, make_step_input
from jaxserve.runner.buckets import Bucket, Buckets
from jaxserve.runner.programs import Newest, decoder_input
from jaxserve.sampling_params import SamplingParams
from jaxserve.speculative import DraftState
from pallas_kernels.paged_attention import select_backend

__all__ = ["all_logits", "hidden_states"]

_BLOCK = 4
_BUCKET = Bucket(96, 1, has_prefill=True)  # one program for prompts and chunks of any length
_MAX_BLOCKS = 24


def all_logits(
    params: dict[str, Any], config: ModelConfig, tokens: Sequence[int], chunks: Sequence[int] | None = None
) -> NDArray[np.float32]:
    """Logits [len(tokens), V] of one row, computed whole or in chunks of the given lengths."""
    return np.asarray(logits(params, jnp.asarray(hidden_states(params, config, tokens, chunks))))


def hidden_states(
    params: dict[str, Any], config: ModelConfig, tokens: Sequence[int], chunks: Sequence[int] | None = None
) -> NDArray[np.float32]:
    """Hidden states [len(tokens), E], from which the logits are made.

    Attention is native where it serves the heads: such a program compiles several times faster.
    """
    order = np.random.default_rng(3).permutation(_MAX_BLOCKS) + 1
    shape = (_MAX_BLOCKS + 1, _BLOCK, config.num_kv_heads, config.head_dim)
    dtype = jnp.dtype(params["embed"].dtype)
    kv = KVCache.zeros(config.num_layers, shape, dtype)
    backend, _ = select_backend("auto", head_dim=config.head_dim, dtype=dtype.name)
    found, start = [], 0
    for length in chunks or [len(tokens)]:
        part = tuple(tokens[start : start + length])
        row = RowPlan("r", 0, start, length, part, 0, True, True, (), 0, tuple(order.tolist()), SamplingParams(), 0)
        step = make_step_input([row], _BUCKET, max_blocks=_MAX_BLOCKS, buckets=Buckets(_BUCKET.tokens, 1))
        kv, out = _step(params, kv, step, config=config, backend=backend)
        found.append(np.asarray(out)[:length])
        start += length
    assert start == len(tokens)
    return np.concatenate(found)


@partial(jax.jit, static_argnames=("config", "backend"))
def _step(
    params: dict[str, Any], kv: KVCache, step: StepInput, *, config: ModelConfig, backend: str
) -> tuple[KVCache, jax.Array]:
    nobody = jnp.zeros(2, jnp.int32)
    inputs = decoder_input(step, Newest(nobody, nobody, DraftState.empty(1, 0)), kv, _BUCKET)
    hidden, kv = decode(params, config, inputs, kv, backend=backend)
    return kv, hidden
