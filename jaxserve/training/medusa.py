"""Medusa heads learn (Medusa-1: the model stays as it is; Cai et al. 2024, arXiv:2401.10774, section 2.2.1).

A head starts as the model's own: residual blocks that add nothing, and the rows of the model's table as its linear. The
loss is the cross-entropy of each head, weighted by 0.8 per token further ahead.

Letters: M examples, E hidden size, K heads, W tokens of the draft vocabulary.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray
from tqdm.auto import tqdm

from jaxserve.speculative import head_logits
from jaxserve.training.checkpoints import restore, save
from jaxserve.training.distill import Examples
from jaxserve.training.options import TrainOptions

__all__ = ["Acceptance", "draft_vocabulary", "first_heads", "measure", "train"]

_DECAY = 0.8
_WARM_UP = 0.05  # share of the steps
_SAVE_SECONDS = 60.0
_MEASURED = 1024  # examples per call
_RANKS = 4  # guesses of a head that a tree may have
_MOST_PATHS = 64

Heads = list[dict[str, Any]]


@dataclass(frozen=True)
class Acceptance:
    """How often heads are right, on texts that they have not seen.

    Attributes:
        right: [K, ranks] share of the positions at which a head's n-th guess is the token that came.
        length: expected tokens of a step with the chain of all heads: 1 and the drafts that are right.
    """

    right: NDArray[np.float64]
    length: float

    def paths(self) -> list[list[int]]:
        """The paths of ranks that are right most often, as if heads were right independently of each other, as the
        authors choose theirs; the best first, and none before its beginning."""
        chances: dict[tuple[int, ...], float] = {(): 1.0}
        open_paths: dict[tuple[int, ...], float] = {(rank,): chance for rank, chance in enumerate(self.right[0])}
        while open_paths and len(chances) <= _MOST_PATHS:
            best = max(open_paths, key=lambda path: (open_paths[path], -len(path)))
            chances[best] = open_paths.pop(best)
            if len(best) < len(self.right):
                ranks = self.right[len(best)]
                open_paths |= {(*best, rank): chances[best] * ranks[rank] for rank in range(len(ranks))}
        return [list(path) for path in itertools.islice(chances, 1, None)]


def draft_vocabulary(targets: NDArray[np.int32], size: int, num_tokens: int) -> NDArray[np.int32] | None:
    """The ``size`` most frequent tokens, of equal ones those with the lowest ids, in the order of ids; None for all.

    A whole number of 64s is taken, which sampling is quickest with.
    """
    size = -(-size // 64) * 64
    if size == 0 or size >= num_tokens:
        return None
    counts = np.bincount(targets[targets >= 0], minlength=num_tokens)
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)


def first_heads(table: jax.Array, num_heads: int, num_layers: int) -> Heads:
    """Heads that guess what the model's own head would: ``table`` [W, E] are its rows."""
    size = table.shape[1]
    return [
        {
            "blocks": [{"weight": jnp.zeros((size, size)), "bias": jnp.zeros(size)} for _ in range(num_layers)],
            "out": jnp.array(table, jnp.float32),
        }
        for _ in range(num_heads)
    ]


def train(
    examples: Examples,
    start: Heads,
    vocabulary: NDArray[np.int32] | None,
    options: TrainOptions,
    folder: Path,
    seed: int,
) -> Heads:
    """Heads after all steps; goes on from the newest checkpoint in ``folder``, and leaves some there."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, options.learning_rate, max(1, round(_WARM_UP * options.steps)), options.steps + 1
    )
    optimiser = optax.adamw(schedule, weight_decay=0.0)
    state = (start, optimiser.init(start))
    first, state = restore(folder, state)
    update = jax.jit(partial(_update, optimiser=optimiser), donate_argnums=0)
    known = _index_of(vocabulary)
    saved = time.monotonic()
    with tqdm(total=options.steps, initial=first, desc="training", unit="step", disable=None) as bar:
        for step in range(first, options.steps):
            chosen = np.random.default_rng([seed, step]).integers(len(examples.targets), size=options.batch_size)
            state, loss = update(state, examples.hidden[chosen], known(examples.targets[chosen]))
            bar.update()
            if step % 20 == 19:
                bar.set_postfix(loss=f"{float(loss):.3f}")
            if time.monotonic() - saved > _SAVE_SECONDS or step + 1 == options.steps:
                save(folder, step + 1, state)
                saved = time.monotonic()
    return state[0]


def measure(heads: Heads, vocabulary: NDArray[np.int32] | None, examples: Examples) -> Acceptance:
    """How often heads are right on examples that they were not trained with."""
    known = _index_of(vocabulary)
    ranks = min(_RANKS, heads[0]["out"].shape[0])
    guess = jax.jit(partial(_guesses, ranks=ranks))
    right = []
    for first in range(0, len(examples.targets), _MEASURED):
        some = slice(first, first + _MEASURED)
        targets = known(examples.targets[some])
        hidden = np.zeros((_MEASURED, examples.hidden.shape[1]), examples.hidden.dtype)
        hidden[: len(targets)] = examples.hidden[some]
        guesses = np.asarray(guess(heads, hidden))[: len(targets)]
        right.append((guesses == targets[..., None]) & (targets >= 0)[..., None])
    there = examples.targets >= 0
    all_right = np.concatenate(right)
    shares = all_right.sum(0) / np.maximum(there.sum(0), 1)[:, None]
    full = there.all(1)
    chain = np.logical_and.accumulate(all_right[full][:, :, 0], axis=1)
    return Acceptance(shares, 1.0 + float(chain.mean(0).sum()) if full.any() else 1.0)


def _update(
    state: tuple[Heads, Any], hidden: jax.Array, targets: jax.Array, *, optimiser: optax.GradientTransformation
) -> tuple[tuple[Heads, Any], jax.Array]:
    heads, memory = state
    loss, gradient = jax.value_and_grad(_loss)(heads, hidden.astype(jnp.float32), targets)
    change, memory = optimiser.update(gradient, memory, heads)
    return (optax.apply_updates(heads, change), memory), loss


def _loss(heads: Heads, hidden: jax.Array, targets: jax.Array) -> jax.Array:
    total = jnp.float32(0)
    for i, head in enumerate(heads):
        wanted, there = jnp.maximum(targets[:, i], 0), targets[:, i] >= 0
        each = optax.softmax_cross_entropy_with_integer_labels(head_logits(head, hidden), wanted)
        total += _DECAY**i * jnp.where(there, each, 0.0).sum() / jnp.maximum(there.sum(), 1)
    return total


def _guesses(heads: Heads, hidden: jax.Array, *, ranks: int) -> jax.Array:
    """The best [M, K, ranks] logits of each head."""
    tops = [jax.lax.top_k(head_logits(head, hidden.astype(jnp.float32)), ranks)[1] for head in heads]
    return jnp.stack(tops, axis=1)


def _index_of(vocabulary: NDArray[np.int32] | None) -> Callable[[NDArray[np.int32]], NDArray[np.int32]]:
    """From tokens to logits of a head; -1 for tokens that it does not know."""
    if vocabulary is None:
        return lambda tokens: tokens

    def find(tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        at = np.minimum(np.searchsorted(vocabulary, tokens), len(vocabulary) - 1)
        return np.where(vocabulary[at] == tokens, at, -1).astype(np.int32)

    return find
