"""Typical acceptance: drafts are kept that the model finds likely enough (Cai et al. 2024, arXiv:2401.10774, 2.3.1).

A draft x after a context is kept if p(x) > min(threshold, alpha * exp(-H(p))), where p is what would be sampled from,
with temperature and filters, and H its entropy: where the model is unsure, less likely tokens are typical. More drafts
are kept than sampling would give, so text no longer follows the model's distribution, and it depends on what was
guessed. Where nothing is sampled (temperature 0), nothing changes.

A draft that is kept takes the place of the token that was sampled. So the rest of a step, logprobs included, is as for
exact acceptance.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxserve.sampling import SamplingInput
from jaxserve.speculative.verify import Places, follow_only

__all__ = ["TypicalAcceptance"]


@dataclass(frozen=True, slots=True)
class TypicalAcceptance:
    """The rule and its numbers.

    Attributes:
        threshold: probability above which a draft is always kept.
        alpha: share of exp(-entropy) above which it is kept as well.
    """

    threshold: float
    alpha: float

    def revise(
        self, places: Places, params: SamplingInput, most: int, tokens: jax.Array, logits: jax.Array
    ) -> jax.Array:
        """Tokens [P] with the drafts of each row's longest path of kept ones in the place of what was sampled.

        Args:
            places: of the step, with at most ``most`` drafts on a path.
            params: of these places.
            tokens: [P], what was sampled.
            logits: [P, V], what it was sampled from, -inf for what cannot be.
        """
        at = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        kept = (tokens[places.parent] == places.draft) | self._typical(places, params, logits)
        reached = follow_only(kept | (places.depth == 0), places.parent, most)
        # Of the deepest places the first, which is the most promising.
        root, rank = at - params.nodes, jnp.where(reached, places.depth * at.shape[0] + at.shape[0] - 1 - at, -1)
        on_path = reached & (rank == jnp.full_like(at, -1).at[root].max(rank)[root])
        ancestor = places.parent
        for _ in range(most.bit_length()):  # twice as far up each time
            on_path, ancestor = on_path.at[ancestor].max(on_path), ancestor[ancestor]
        follows = on_path & (places.depth > 0)
        return tokens.at[jnp.where(follows, places.parent, at.shape[0])].set(places.draft, mode="drop")

    def _typical(self, places: Places, params: SamplingInput, logits: jax.Array) -> jax.Array:
        """Which places [P] follow a draft that the rule keeps."""
        logprobs = jax.nn.log_softmax(logits, axis=-1)
        entropy = -jnp.where(jnp.isneginf(logprobs), 0.0, logprobs * jnp.exp(logprobs)).sum(-1)
        bar = jnp.minimum(self.threshold, self.alpha * jnp.exp(-entropy))
        chance = jnp.exp(logprobs[places.parent, jnp.maximum(places.draft, 0)])
        return (params.temperature > 0) & (places.draft >= 0) & (chance > bar[places.parent])
