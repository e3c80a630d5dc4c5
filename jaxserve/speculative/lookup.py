"""Where the newest tokens of a row stood before: the search behind prompt lookup and the suffix corpus.

Letters: R rows, M tokens of a text, L most tokens of a match, K drafts.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.speculative.drafts import NO_DRAFT

__all__ = ["Match", "find_match", "follow", "newest_tokens"]

_NO_TOKEN = -2
"""Stands in the place of newest tokens that a row does not have; equal to nothing, NO_DRAFT included."""


class Match(NamedTuple):
    """The best match of each row.

    Attributes:
        size: [R] int32, tokens that match, 0 for no match.
        end: [R] int32, place after the last of them.
    """

    size: jax.Array
    end: jax.Array


def newest_tokens(history: jax.Array, length: jax.Array, count: int) -> jax.Array:
    """The last ``count`` tokens [R, L] of histories [R, C] of length [R], the newest first."""
    at = length[:, None] - 1 - jnp.arange(count)
    return jnp.where(at >= 0, jnp.take_along_axis(history, jnp.maximum(at, 0), axis=1), _NO_TOKEN)


def find_match(text: jax.Array, newest: jax.Array, stop: jax.Array | int, shortest: int) -> Match:
    """The longest match of newest tokens [R, L] within the first ``stop`` ([R] or one) tokens of text [R or 1, M].

    Of equal ones the latest; one of fewer than ``shortest`` tokens is none. NO_DRAFT in the text matches nothing.
    """
    num_places, longest = text.shape[1], newest.shape[1]
    at = jnp.arange(num_places)
    # Padded once, behind a barrier: XLA would compute the padding anew in each comparison, at thrice the time on a CPU.
    padded = jax.lax.optimization_barrier(jnp.pad(text, ((0, 0), (longest - 1, 0)), constant_values=NO_DRAFT))
    alike = at < jnp.broadcast_to(stop, newest.shape[:1])[:, None]
    run = jnp.zeros(alike.shape, jnp.int32)
    for back in range(longest):
        first = longest - 1 - back
        alike &= padded[:, first : first + num_places] == newest[:, back, None]
        run += alike
    score = jnp.where(run >= shortest, run * num_places + at, -1).max(1)
    return Match(jnp.maximum(score, 0) // num_places, jnp.where(score >= 0, score % num_places + 1, 0))


def follow(text: jax.Array, match: Match, length: jax.Array | int, num_drafts: int) -> jax.Array:
    """The K tokens [R, K] behind matches in text [R or 1, M], of which ``length`` ([R] or one) tokens are there.

    Where the text ends before, it is taken to repeat from the match on. Nothing goes on behind a NO_DRAFT.
    """
    end, row = match.end[:, None], jnp.arange(match.end.shape[0])[:, None] % text.shape[0]
    distance = jnp.maximum(jnp.broadcast_to(length, match.end.shape)[:, None] - end, 1)
    source = end + jnp.arange(num_drafts) % distance
    tokens = text[row, jnp.clip(source, 0, text.shape[1] - 1)]
    there = jnp.cumprod(tokens != NO_DRAFT, axis=1, dtype=jnp.int32) * (match.size > 0)[:, None]
    return jnp.where(there == 1, tokens, NO_DRAFT)
