"""Which drafts are right.

A step samples at every place: after a row's newest token, and after each of its drafts as if that were right. The noise
of a token depends on its seed and position alone, so what is sampled after a prefix of right drafts is, bit for bit,
what plain decoding samples there. A draft is right if it is what was sampled after its parent, and the parent is right.
So the output is that of plain decoding, for every temperature, filter, penalty and constraint, whatever was guessed and
however often it was wrong.

Rejection sampling (Leviathan et al. 2023, arXiv:2211.17192) keeps the distribution only: its tokens depend on the
drafts. For a draft that is certain (a prompt lookup, an argmax) both accept equally often, with the probability of the
draft. A proposer that samples with the same noise is accepted almost as often as by the best coupling there is (Daliri
et al. 2024, arXiv:2408.07978).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.sampling import SamplingInput
from jaxserve.speculative.drafts import NO_DRAFT, DraftState

__all__ = ["Places", "find_places", "find_reached", "follow_only"]


class Places(NamedTuple):
    """Where the places of a step stand; P places, K most drafts of a row.

    Attributes:
        draft: [P] int32, the draft that a place follows, NO_DRAFT after a row's newest token.
        parent: [P] int32, the place that gave this draft; the place itself if there is none.
        depth: [P] int32, drafts between the row's newest token and the place.
        context: [P, K] int32, these drafts, and NO_DRAFT in the place of others.
    """

    draft: jax.Array
    parent: jax.Array
    depth: jax.Array
    context: jax.Array


def find_places(drafts: DraftState, params: SamplingInput) -> Places:
    """The places of a step."""
    nodes = jnp.asarray(params.nodes)
    at = jnp.arange(nodes.shape[0], dtype=jnp.int32)
    return Places(
        draft=drafts.token(params.rows, nodes),
        parent=at - nodes + drafts.parent(params.rows, nodes),
        depth=drafts.depth(params.rows, nodes),
        context=drafts.context(params.rows, nodes),
    )


def find_reached(places: Places, tokens: jax.Array, most: int) -> tuple[jax.Array, jax.Array]:
    """Which places follow right drafts only, and which of these end their row, given tokens [P] sampled at each.

    ``most`` is the most drafts on a path. Returns two bool arrays [P].
    """
    right = (places.draft == NO_DRAFT) & (places.depth == 0) | (tokens[places.parent] == places.draft)
    reached = follow_only(right, places.parent, most)
    followed = jnp.zeros_like(reached).at[places.parent].max(reached & (places.depth > 0))
    return reached, reached & ~followed


def follow_only(right: jax.Array, parent: jax.Array, most: int) -> jax.Array:
    """Which places [P] are ``right``, as are all before them on their path of ``most`` places or fewer."""
    for _ in range(most.bit_length()):  # twice as far up each time
        right, parent = right & right[parent], parent[parent]
    return right
