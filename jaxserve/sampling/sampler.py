"""Logits to tokens, for all rows of a step at once.

Order: penalties, bias, mask of legal tokens; temperature, min-p, top-k, top-p; then the Gumbel-max trick: the sample
is the argmax of logits plus noise. Noise is a function of (seed, position) only, so that a request's tokens depend
neither on the batch nor on when it was preempted. Parts that no row of the step asks for are skipped at run time, in
the one program.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct

from jaxserve.sampling.arrays import IN_PROMPT, RowState, SamplingInput
from jaxserve.sampling.filters import keep_likely
from jaxserve.sampling.penalties import penalise
from jaxserve.sampling_params import MAX_LOGPROBS

__all__ = ["Sampled", "noise", "sample"]

_GROUP = 64  # tokens

_COLDEST = 1e-6
"""Temperatures below would overflow the logits, and nobody could tell them from this one."""


@struct.dataclass
class Sampled:
    """What a step sampled.

    Attributes:
        tokens: [R] int32.
        logprobs: [R] float32, log probability of each in the raw logits (0 where nobody asked).
        ranks: [R] int32, 1 for the likeliest token.
        top_ids, top_logprobs: [R, MAX_LOGPROBS] the likeliest tokens, best first.
    """

    tokens: jax.Array
    logprobs: jax.Array
    ranks: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


def sample(
    logits: jax.Array, state: RowState, params: SamplingInput, mask: jax.Array, masked: jax.Array
) -> tuple[Sampled, RowState]:
    """Sample one token per row of logits [R, V].

    Args:
        logits: [R, V] float32, raw.
        state: the device's rows; ``params.rows`` says which are meant.
        params: [R] arrays.
        mask: [R, ceil(V / 32)] uint32, bit t % 32 of word t // 32 says whether token t is legal.
        masked: [] bool, whether the mask says anything.
    """
    penalised = ((params.presence != 0) | (params.frequency != 0) | (params.repetition != 1)).any()
    greedy = ~(penalised | params.biased.any() | masked | (params.temperature > 0).any())

    def choose(logits: jax.Array) -> jax.Array:
        changed = _when(penalised, lambda x: penalise(x, state.counts[params.rows], params), logits)
        changed = _when(
            params.biased.any(), lambda x: x + jnp.where(params.biased[:, None], state.bias[params.rows], 0.0), changed
        )
        changed = _when(masked, lambda x: jnp.where(_unpack(mask, x.shape[1]), x, -jnp.inf), changed)
        return jax.lax.cond((params.temperature > 0).any(), lambda x: _noisy_argmax(x, params), _argmax, changed)

    # Around all the others: a condition that changes nothing still copies the logits.
    tokens = jax.lax.cond(greedy, _argmax, choose, logits)
    state = replace(
        state,
        last_token=state.last_token.at[params.rows].set(tokens),
        counts=_count(state.counts, params.rows, tokens, penalised),
    )
    return _with_logprobs(logits, tokens, params), state


def _when(wanted: jax.Array, change: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    return jax.lax.cond(wanted, change, lambda same: same, x)


def _argmax(logits: jax.Array) -> jax.Array:
    """argmax of [R, V] -> [R] int32, the first of equal ones.

    Of groups first, then within the best: XLA turns a maximum, but no argmax, into vector instructions on the CPU (64
    rows of 49,152: 7.5 -> 1.7 ms).
    """
    num_rows, vocab_size = logits.shape
    if vocab_size % _GROUP:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    groups = logits.reshape(num_rows, -1, _GROUP)
    best = jnp.argmax(groups.max(-1), axis=-1)
    within = jnp.argmax(jnp.take_along_axis(groups, best[:, None, None], axis=1)[:, 0], axis=-1)
    return (best * _GROUP + within).astype(jnp.int32)


def _noisy_argmax(logits: jax.Array, params: SamplingInput) -> jax.Array:
    filtering = (params.top_k < logits.shape[1]) | (params.top_p < 1) | (params.min_p > 0)
    warmth = jnp.maximum(params.temperature, _COLDEST)
    scaled = logits / jnp.where(params.temperature > 0, warmth, 1.0)[:, None]
    scaled = _when(filtering.any(), lambda x: keep_likely(x, params), scaled)
    noisy = scaled + noise(params.seeds, params.positions, logits.shape[1])
    return jnp.where(params.temperature > 0, _argmax(noisy), _argmax(logits))


def noise(seeds: jax.Array, positions: jax.Array, vocab_size: int) -> jax.Array:
    """Gumbel noise [R, V] from seeds [R, 2] and positions [R] alone."""

    def row(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
        return jax.random.gumbel(key, (vocab_size,), jnp.float32)

    return jax.vmap(row)(seeds, positions)


def _count(counts: jax.Array, rows: jax.Array, tokens: jax.Array, wanted: jax.Array) -> jax.Array:
    """Adds nothing, in place, where it is not wanted: a condition would copy the counts of the whole vocabulary."""
    full = counts[rows, tokens] & (IN_PROMPT - 1) == IN_PROMPT - 1
    return counts.at[rows, tokens].add(jnp.where(full | ~wanted, 0, 1).astype(jnp.int16))


def _unpack(mask: jax.Array, vocab_size: int) -> jax.Array:
    bits = (mask[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return bits.reshape(mask.shape[0], -1)[:, :vocab_size] == 1


def _with_logprobs(logits: jax.Array, tokens: jax.Array, params: SamplingInput) -> Sampled:
    """Log probabilities in the raw logits [R, V], if some row wants them."""
    num_rows, vocab_size = logits.shape
    top = min(MAX_LOGPROBS, vocab_size)

    def measure(logits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        logprobs = jax.nn.log_softmax(logits, axis=-1)
        chosen = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)
        ranks = (logprobs > chosen).sum(-1).astype(jnp.int32) + 1
        values, ids = jax.lax.top_k(logprobs, top)
        return chosen[:, 0], ranks, ids.astype(jnp.int32), values

    def nothing(logits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        shape = (num_rows, top)
        return (
            jnp.zeros(num_rows),
            jnp.zeros(num_rows, jnp.int32),
            jnp.zeros(shape, jnp.int32),
            jnp.zeros(shape),
        )

    return Sampled(tokens, *jax.lax.cond((params.num_logprobs >= 0).any(), measure, nothing, logits))
