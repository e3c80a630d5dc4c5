"""An EAGLE head learns to go on from its own guesses (EAGLE-1 by its form; see ``speculative.eagle_head``).

At each token it guesses the model's hidden state there, and through the model's output head what follows. It is told
both: the state itself, and the chances that the model gives to each token of the draft vocabulary (Li et al. 2024,
arXiv:2401.15077, section 4.2). While it drafts it sees true states up to the newest token, and its own guesses behind
that; so it is trained in passes, each of which puts the guesses of the one before in the place of states (training-time
test, Li et al. 2025, arXiv:2503.01840): in pass d, pair p sees true states up to p - d and the guesses of one pass each
after these.

It begins with the best product that least squares can find, and a layer that adds nothing to it: on a small model that
alone guesses more than half of what hundreds of steps teach.

Letters: N texts of a batch, L their tokens, E hidden size, V tokens that the texts have, W tokens that can be guessed,
H, K, D heads, KV heads and their size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxserve.layers import rope_table
from jaxserve.models.config import ModelConfig
from jaxserve.speculative import EagleHead, eagle_specs, guess_logits, run_head
from jaxserve.training.acceptance import Acceptance, index_of
from jaxserve.training.descent import descend
from jaxserve.training.distill import Texts
from jaxserve.training.options import TrainOptions

__all__ = ["Known", "first_head", "fit_product", "head_of", "measure", "train"]

_DECAY = 0.8  # of the weight of a pass, against the one before
_STATE_WEIGHT = 1.0  # of the loss of states, in units of their own size, against that of tokens
_MEASURED = 8  # texts per call
_FITTED = 4096  # pairs per product of the least squares
_RIDGE = 1e-3  # of each value's own square, against products that only rare tokens ask for

Params = dict[str, Any]


@dataclass(frozen=True)
class Known:
    """What the model gives to its head.

    Attributes:
        tokens: [V] int32, the tokens that the texts have, ascending.
        embed: [V, E] float32, their vectors.
        table: [W, E] float32, rows of the model's output head.
        vocabulary: [W] int32, the tokens that they stand for; None for all in order.
    """

    tokens: NDArray[np.int32]
    embed: NDArray[np.float32]
    table: NDArray[np.float32]
    vocabulary: NDArray[np.int32] | None


class _Batch(NamedTuple):
    """Texts, each from its first token.

    Attributes:
        fixed: what does not learn: "embed" and "out".
        tokens: [N, L] int32, rows of "embed".
        targets: [N, L] int32, the logit of each of these tokens, -1 for those that cannot be guessed.
        states: [N, L, E] bfloat16, the model's at each.
        lengths: [N] int32.
        firsts: [N] int32, where what the model wrote begins.
    """

    fixed: Params
    tokens: Any
    targets: Any
    states: Any
    lengths: Any
    firsts: Any


def head_of(model: ModelConfig) -> EagleHead:
    """The form of a head for a model: a plain Llama layer of its sizes."""
    plain = replace(
        model,
        family="llama",
        num_layers=1,
        windows=(None,),
        rope_layers=(True,),
        rope_scaling=None,
        soft_cap=None,
        qk_norm=False,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
    )
    return EagleHead(plain)


def first_head(head: EagleHead, seed: int) -> Params:
    """A head that guesses that nothing changes: its product hands the state on, and the layer adds nothing."""
    random = np.random.default_rng(seed)
    size = head.layer.hidden_size

    def first(spec: Any) -> jax.Array:
        if len(spec.shape) == 1:
            return jnp.ones(spec.shape)
        return jnp.asarray(random.normal(0.0, spec.shape[0] ** -0.5, spec.shape), jnp.float32)

    params: Params = jax.tree.map(first, eagle_specs(head, 0))
    params["fc"] = jnp.concatenate([jnp.zeros((size, size)), jnp.eye(size)])
    for name in ("o", "down"):
        params["layer"][name] = jnp.zeros_like(params["layer"][name])
    return params


def fit_product(start: Params, known: Known, texts: Texts) -> Params:
    """The head with the product that comes closest to the next states, by least squares over all pairs of the texts."""
    inside = np.ones(len(texts.tokens), bool)
    inside[texts.starts] = False
    pairs = np.flatnonzero(inside)
    size = known.embed.shape[1]
    squares, products = np.zeros((2 * size, 2 * size)), np.zeros((2 * size, size))
    for first in range(0, len(pairs), _FITTED):
        some = pairs[first : first + _FITTED]
        vectors = known.embed[np.searchsorted(known.tokens, texts.tokens[some])]
        seen = np.concatenate([vectors, texts.hidden[some - 1].astype(np.float32)], axis=1)
        squares += seen.T @ seen
        products += seen.T @ texts.hidden[some].astype(np.float32)
    own = np.diag(squares)
    squares[np.diag_indices_from(squares)] += _RIDGE * own + 1e-6 * own.mean()
    return start | {"fc": jnp.asarray(np.linalg.solve(squares, products), jnp.float32)}


def train(
    texts: Texts, start: Params, head: EagleHead, known: Known, options: TrainOptions, folder: Path, seed: int
) -> Params:
    """The head after all steps; see ``descend``. A step learns from as many texts as have its batch's tokens."""
    length = int(texts.lengths.max())
    count = max(1, options.batch_size // length)
    batches = _Batches(texts, known, length)

    def draw(random: np.random.Generator) -> _Batch:
        return batches.of(random.integers(len(texts.lengths), size=count))

    return descend(start, partial(_loss, head=head, passes=options.num_passes), draw, options, folder, seed)


def measure(params: Params, head: EagleHead, known: Known, texts: Texts, passes: int) -> Acceptance:
    """How often chains of ``passes`` guesses are right, behind each token that the model wrote."""
    right = jax.jit(partial(_right, head=head, passes=passes))
    batches = _Batches(texts, known, int(texts.lengths.max()))
    total = np.zeros((2, passes))
    chains = np.zeros(2)
    for some, count in _groups(len(texts.lengths)):
        ok, there = (np.asarray(part)[:, :count] for part in right(params, batches.of(some)))
        total += np.stack([(ok & there).sum((1, 2)), there.sum((1, 2))])
        whole = there.all(0)
        chains += (np.logical_and.accumulate(ok, axis=0).sum(0)[whole].sum(), whole.sum())
    shares = total[0] / np.maximum(total[1], 1)
    return Acceptance(shares[:, None], 1.0 + float(chains[0] / max(chains[1], 1)))


def _groups(count: int) -> Iterator[tuple[NDArray[np.int64], int]]:
    """Indices of texts, the same number each time as the last group repeats its last text, and how many are new."""
    for first in range(0, count, _MEASURED):
        yield np.minimum(np.arange(first, first + _MEASURED), count - 1), min(_MEASURED, count - first)


class _Batches:
    """Makes batches of texts, each ``length`` tokens long."""

    def __init__(self, texts: Texts, known: Known, length: int) -> None:
        self._texts, self._length = texts, length
        self._at = np.searchsorted(known.tokens, texts.tokens).astype(np.int32)
        self._targets = index_of(known.vocabulary)(texts.tokens)
        self._fixed = {"embed": jnp.asarray(known.embed), "out": jnp.asarray(known.table)}

    def of(self, some: NDArray[np.int64]) -> _Batch:
        """Texts ``some`` [N]."""
        texts = self._texts
        lengths, starts = texts.lengths[some], texts.starts[some]
        index = np.minimum(starts[:, None] + np.arange(self._length), len(texts.tokens) - 1)
        return _Batch(
            self._fixed,
            self._at[index],
            self._targets[index],
            texts.hidden[index],
            lengths.astype(np.int32),
            texts.prompts[some].astype(np.int32),
        )


def _loss(params: Params, batch: _Batch, *, head: EagleHead, passes: int) -> jax.Array:
    """Smooth L1 of the states, and the cross-entropy of the guessed chances with the model's, over all passes."""
    states = batch.states.astype(jnp.float32)
    size = jnp.sqrt(jnp.mean(states**2))
    there = jnp.arange(1, states.shape[1]) < batch.lengths[:, None]
    wanted = jax.nn.softmax(states @ batch.fixed["out"].T)[:, 1:]
    total = jnp.float32(0)
    for i, (guessed, logits) in enumerate(_passes(params, batch, head, passes)):
        error = jnp.abs(guessed[:, 1:] - states[:, 1:]) / size
        smooth = jnp.where(error < 1, 0.5 * error**2, error - 0.5).mean(-1)
        tokens = -(wanted * jax.nn.log_softmax(logits[:, 1:])).sum(-1)
        counted = there & (jnp.arange(1, states.shape[1]) > i)
        each = jnp.where(counted, _STATE_WEIGHT * smooth + tokens, 0.0)
        total += _DECAY**i * each.sum() / jnp.maximum(counted.sum(), 1)
    return total


def _right(params: Params, batch: _Batch, *, head: EagleHead, passes: int) -> tuple[jax.Array, jax.Array]:
    """Which guesses are right, and which there are, bool [passes, N, L]: the d-th of a chain that begins at a token.

    A chain begins at a token that the model wrote, with a guess at the next one.
    """
    length = batch.tokens.shape[1]
    at = jnp.arange(length)
    right, there = [], []
    for i, (_, logits) in enumerate(_passes(params, batch, head, passes)):
        target = at + i + 1  # guessed by pair at + i of pass i
        wanted = jnp.take(batch.targets, jnp.minimum(target, length - 1), axis=1)
        best = jnp.argmax(jnp.take(logits, jnp.minimum(at + i, length - 1), axis=1), axis=-1)
        right.append(best == wanted)
        there.append((at >= batch.firsts[:, None]) & (target < batch.lengths[:, None]))
    return jnp.stack(right), jnp.stack(there)


def _passes(params: Params, batch: _Batch, head: EagleHead, passes: int) -> Iterator[tuple[jax.Array, jax.Array]]:
    """The states [N, L, E] that are guessed at each token, and the logits [N, L, W] of what follows, pass by pass."""
    length = batch.tokens.shape[1]
    positions = jnp.arange(length)
    rotation = rope_table(positions, head.layer)
    known = params | batch.fixed
    states = batch.states.astype(jnp.float32)
    kept: list[tuple[jax.Array, jax.Array]] = []
    for _ in range(passes):
        before = jnp.pad(states, ((0, 0), (1, 0), (0, 0)))[:, :-1]

        def one(tokens: jax.Array, before: jax.Array, earlier: Any) -> tuple[jax.Array, Any]:
            attend = partial(_attend, earlier=earlier)
            return run_head(known, head, tokens, before, positions, rotation, attend, backend="reference")

        states, keys_values = jax.vmap(one)(batch.tokens, before, kept)
        kept = [*kept, keys_values]
        logits = guess_logits(known, head, states.reshape(-1, states.shape[-1]), backend="reference")
        yield states, logits.reshape(*states.shape[:2], -1)


def _attend(
    q: jax.Array, k: jax.Array, v: jax.Array, *, earlier: list[tuple[jax.Array, jax.Array]]
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Attention of pass d = len(earlier), q [L, H, D] and k, v [L, K, D]; ``earlier`` are those of the passes before.

    Pair p sees pairs 0 … p - d as the first pass made them, and behind these one pair of each later pass, its own last.
    """
    length, num_heads, dim = q.shape
    queries = q.reshape(length, k.shape[1], -1, dim) * dim**-0.5
    passes = [*earlier, (k, v)]
    at = jnp.arange(length)
    base = jnp.einsum("pkgd,skd->pkgs", queries, passes[0][0])
    seen = at <= at[:, None] - len(earlier)
    scores = [jnp.where(seen[:, None, None], base, -jnp.inf)]
    single = []
    for i, (keys, values) in enumerate(passes[1:], start=1):
        pair = at - (len(earlier) - i)
        own, rows = keys[jnp.maximum(pair, 0)], values[jnp.maximum(pair, 0)]
        score = jnp.einsum("pkgd,pkd->pkg", queries, own)[..., None]
        scores.append(jnp.where((pair >= 0)[:, None, None, None], score, -jnp.inf))
        single.append(rows)
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1)
    out = jnp.einsum("pkgs,skd->pkgd", weights[..., :length], passes[0][1])
    for i, rows in enumerate(single):
        out += weights[..., length + i, None] * rows[:, :, None]
    return out.reshape(length, num_heads, dim), (k, v)
