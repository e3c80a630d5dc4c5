"""Medusa heads learn (Medusa-1: the model stays as it is; Cai et al. 2024, arXiv:2401.10774, section 2.2.1).

A head starts as the model's own: residual blocks that add nothing, and the rows of the model's table as its linear. The
loss is the cross-entropy of each head, weighted by 0.8 per token further ahead.

Letters: M examples, E hidden size, K heads, W tokens of the draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray

from jaxserve.speculative import head_logits
from jaxserve.training.acceptance import Acceptance, index_of
from jaxserve.training.descent import descend
from jaxserve.training.distill import Texts
from jaxserve.training.options import TrainOptions

__all__ = ["Examples", "examples_of", "first_heads", "measure", "train"]

_DECAY = 0.8
_MEASURED = 1024  # examples per call
_RANKS = 4  # guesses of a head that a tree may have
_NONE = -1

Heads = list[dict[str, Any]]


@dataclass(frozen=True)
class Examples:
    """Positions to learn from.

    Attributes:
        hidden: [M, E] bfloat16, the state that the next token is sampled from.
        targets: [M, K] int32, the tokens after the next; -1 past the end of the text.
    """

    hidden: NDArray[Any]
    targets: NDArray[np.int32]


def examples_of(texts: Texts, num_heads: int) -> Examples:
    """The states that the model's own tokens were sampled from, and what came after these tokens."""
    hidden, targets = [], []
    for start, length, prompt in zip(texts.starts, texts.lengths, texts.prompts, strict=True):
        # Positions with a next token of the model's, and one more after it.
        at = np.arange(prompt - 1, max(prompt - 1, length - 2))
        padded = np.concatenate([texts.tokens[start : start + length], np.full(num_heads, _NONE, np.int32)])
        hidden.append(texts.hidden[start + at])
        targets.append(padded[at[:, None] + 2 + np.arange(num_heads)])
    return Examples(np.concatenate(hidden), np.concatenate(targets))


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
    """Heads after all steps; see ``descend``."""
    known = index_of(vocabulary)

    def draw(random: np.random.Generator) -> tuple[NDArray[Any], NDArray[np.int32]]:
        chosen = random.integers(len(examples.targets), size=options.batch_size)
        return examples.hidden[chosen], known(examples.targets[chosen])

    return descend(start, _loss, draw, options, folder, seed)


def measure(heads: Heads, vocabulary: NDArray[np.int32] | None, examples: Examples) -> Acceptance:
    """How often heads are right on examples that they were not trained with."""
    known = index_of(vocabulary)
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


def _loss(heads: Heads, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    hidden, targets = batch[0].astype(jnp.float32), batch[1]
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
