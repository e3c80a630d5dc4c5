"""Logits to tokens, for all places of a step at once.

Order: penalties, bias, mask of legal tokens; temperature, min-p, top-k, top-p; then the Gumbel-max trick: the sample
is the argmax of logits plus noise. Noise is a function of (seed, position) only, so that a request's tokens depend
neither on the batch nor on when it was preempted. Parts that no place of the step asks for are skipped at run time, in
the one program.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from jaxserve.sampling.arrays import RowState, SamplingInput
from jaxserve.sampling.filters import keep_likely
from jaxserve.sampling.penalties import penalise
from jaxserve.sampling_params import MAX_LOGPROBS

__all__ = ["Sampled", "measure", "noise", "rank_plainly", "sample", "sample_plainly", "score_plainly"]

_GROUP = 64  # tokens

_Measured = tuple[jax.Array, jax.Array, jax.Array, jax.Array]

Revise = Callable[[jax.Array, jax.Array], jax.Array]

_COLDEST = 1e-6
"""Temperatures below would overflow the logits, and nobody could tell them from this one."""


@struct.dataclass
class Sampled:
    """What a step sampled.

    Attributes:
        tokens: [P] int32.
        logprobs: [P] float32, log probability of each in the raw logits, or in those that it was sampled from where
            that was asked for (0 where nobody asked for any).
        ranks: [P] int32, 1 for the likeliest token.
        top_ids, top_logprobs: [P, MAX_LOGPROBS] the likeliest tokens, best first.
    """

    tokens: jax.Array
    logprobs: jax.Array
    ranks: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


def sample(
    logits: jax.Array,
    state: RowState,
    params: SamplingInput,
    mask: jax.Array,
    masked: jax.Array,
    *,
    positions: jax.Array,
    context: jax.Array,
    revise: Revise | None = None,
) -> Sampled:
    """Sample one token per place.

    Args:
        logits: [P, V] float32, raw.
        state: the device's rows; ``params.rows`` says which are meant.
        params: [P] arrays.
        mask: [P, ceil(V / 32)] uint32, bit t % 32 of word t // 32 says whether token t is legal.
        masked: [] bool, whether the mask says anything.
        positions: [P] int32, positions of the tokens to sample.
        context: [P, K] int32, drafts that stand between the row's newest token and each place; -1 for none.
        revise: what makes of tokens [P], and of logits [P, V] that they were sampled from, the tokens that count.
    """
    penalised = params.penalised.any()
    greedy = ~(penalised | params.biased.any() | masked | (params.temperature > 0).any())

    def changed(logits: jax.Array) -> jax.Array:
        changed = _when(penalised, lambda x: penalise(x, _counts(state, params, context), params), logits)
        changed = _when(
            params.biased.any(), lambda x: x + jnp.where(params.biased[:, None], state.bias[params.rows], 0.0), changed
        )
        return _when(masked, lambda x: jnp.where(_unpack(mask, x.shape[1]), x, -jnp.inf), changed)

    def choose(logits: jax.Array) -> jax.Array:
        warm = (params.temperature > 0).any()
        return jax.lax.cond(warm, lambda x: _noisy_argmax(x, params, positions, revise), _argmax, changed(logits))

    def processed(logits: jax.Array) -> jax.Array:
        legal = changed(logits)
        sampled_from = jnp.where(params.temperature[:, None] > 0, _likely(legal, params), legal)
        return jnp.where(params.processed[:, None], sampled_from, logits)

    # Around all the others: a condition that changes nothing still copies the logits.
    tokens = jax.lax.cond(greedy, _argmax, choose, logits)
    return _with_logprobs(logits, tokens, params, processed)


def _counts(state: RowState, params: SamplingInput, context: jax.Array) -> jax.Array:
    """Counts [P, V] of the tokens before each place."""
    counts = state.counts[params.rows]
    places = jnp.arange(context.shape[0])
    for drafts in context.T:
        counts = counts.at[places, jnp.where(drafts < 0, counts.shape[1], drafts)].add(1, mode="drop")
    return counts


def _when(wanted: jax.Array, change: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    return jax.lax.cond(wanted, change, lambda same: same, x)


def _argmax(logits: jax.Array) -> jax.Array:
    """argmax of [P, V] -> [P] int32, the first of equal ones.

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


def sample_plainly(logits: jax.Array, temperature: jax.Array, seeds: jax.Array, positions: jax.Array) -> jax.Array:
    """Sample from logits [P, V] by temperature [P] alone, with the noise that ``sample`` would take: tokens [P]."""
    return rank_plainly(logits, temperature, seeds, positions)[:, 0]


def rank_plainly(
    logits: jax.Array,
    temperature: jax.Array,
    seeds: jax.Array,
    positions: jax.Array,
    count: int = 1,
    part: tuple[jax.Array, int] | None = None,
) -> jax.Array:
    """The tokens [P, count] that ``sample_plainly`` would sample, if those before could not be.

    ``part`` are the tokens [W] that logits [P, W] stand for, and V, where they are not all.
    """

    def best(x: jax.Array) -> jax.Array:
        return _argmax(x)[:, None] if count == 1 else jax.lax.top_k(x, count)[1].astype(jnp.int32)

    def noisy(x: jax.Array) -> jax.Array:
        return best(_noisy(x[:, None], temperature, seeds, positions, part)[:, 0])

    ranked = jax.lax.cond((temperature > 0).any(), noisy, best, logits)
    return ranked if part is None else part[0][ranked]


def score_plainly(
    logits: jax.Array,
    temperature: jax.Array,
    seeds: jax.Array,
    positions: jax.Array,
    part: tuple[jax.Array, int] | None = None,
) -> jax.Array:
    """What ``rank_plainly`` ranks by, for n ways in which a row may go on: [P, n, W] from logits [P, n, W]."""

    def noisy(x: jax.Array) -> jax.Array:
        return _noisy(x, temperature, seeds, positions, part)

    return jax.lax.cond((temperature > 0).any(), noisy, lambda x: x, logits)


def _noisy(
    logits: jax.Array,
    temperature: jax.Array,
    seeds: jax.Array,
    positions: jax.Array,
    part: tuple[jax.Array, int] | None,
) -> jax.Array:
    """Logits [P, n, W] by temperature [P], with the noise of positions [P]; greedy rows as they are."""
    gumbel = noise(seeds, positions, logits.shape[2] if part is None else part[1])
    if part is not None:
        gumbel = gumbel[:, part[0]]
    warm = temperature[:, None, None]
    return jnp.where(warm > 0, _scaled(logits, warm) + gumbel[:, None], logits)


def _scaled(logits: jax.Array, temperature: jax.Array) -> jax.Array:
    return logits / jnp.where(temperature > 0, jnp.maximum(temperature, _COLDEST), 1.0)


def _noisy_argmax(logits: jax.Array, params: SamplingInput, positions: jax.Array, revise: Revise | None) -> jax.Array:
    scaled = _likely(logits, params)
    noisy = scaled + noise(params.seeds, positions, logits.shape[1])
    tokens = jnp.where(params.temperature > 0, _argmax(noisy), _argmax(logits))
    return tokens if revise is None else revise(tokens, scaled)


def _likely(logits: jax.Array, params: SamplingInput) -> jax.Array:
    """Logits [P, V] by temperature, -inf where filters drop them."""
    filtering = (params.top_k < logits.shape[1]) | (params.top_p < 1) | (params.min_p > 0)
    return _when(filtering.any(), lambda x: keep_likely(x, params), _scaled(logits, params.temperature[:, None]))


def noise(seeds: jax.Array, positions: jax.Array, vocab_size: int) -> jax.Array:
    """Gumbel noise [P, V] from seeds [P, 2] and positions [P] alone."""

    def row(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
        return jax.random.gumbel(key, (vocab_size,), jnp.float32)

    return jax.vmap(row)(seeds, positions)


def _unpack(mask: jax.Array, vocab_size: int) -> jax.Array:
    bits = (mask[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return bits.reshape(mask.shape[0], -1)[:, :vocab_size] == 1


def _log_softmax(logits: jax.Array) -> jax.Array:
    """Log probabilities of logits [P, V], the same bits for a row whatever P is.

    On the CPU XLA sums rows in an order that depends on how many there are, so they are taken one after the other.
    """
    return jax.lax.platform_dependent(
        logits, cpu=lambda rows: jax.lax.map(jax.nn.log_softmax, rows), default=jax.nn.log_softmax
    )


def _with_logprobs(
    logits: jax.Array, tokens: jax.Array, params: SamplingInput, processed: Callable[[jax.Array], jax.Array]
) -> Sampled:
    """Log probabilities in the raw logits [P, V], if some place wants them, or in what is ``processed`` of them."""
    num_rows = logits.shape[0]

    def measured(logits: jax.Array) -> _Measured:
        return measure(_when(params.processed.any(), processed, logits), tokens, jnp.bool_(True))

    def nothing(logits: jax.Array) -> _Measured:
        return jnp.zeros(num_rows), jnp.zeros(num_rows, jnp.int32), *_no_top(logits)

    return Sampled(tokens, *jax.lax.cond((params.num_logprobs >= 0).any(), measured, nothing, logits))


def measure(logits: jax.Array, tokens: jax.Array, wants_top: jax.Array) -> _Measured:
    """Log probabilities [P] and ranks [P] of tokens [P] in raw logits [P, V], and the likeliest ones (see ``Sampled``),
    zeros unless ``wants_top`` [] bool."""
    logprobs = _log_softmax(logits)
    chosen = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)
    ranks = (logprobs > chosen).sum(-1).astype(jnp.int32) + 1
    return chosen[:, 0], ranks, *jax.lax.cond(wants_top, _top, _no_top, logprobs)


def _top(logprobs: jax.Array) -> tuple[jax.Array, jax.Array]:
    values, ids = jax.lax.top_k(logprobs, min(MAX_LOGPROBS, logprobs.shape[1]))
    return ids.astype(jnp.int32), values


def _no_top(logprobs: jax.Array) -> tuple[jax.Array, jax.Array]:
    shape = (logprobs.shape[0], min(MAX_LOGPROBS, logprobs.shape[1]))
    return jnp.zeros(shape, jnp.int32), jnp.zeros(shape)
