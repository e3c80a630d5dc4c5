"""A head that writes ahead in hidden states (EAGLE; see ``eagle_head``), in a chain or a tree.

The chain is the best guess after the best guess. The tree is that of EAGLE-2 (Li et al. 2024, arXiv:2406.16858): from
depth to depth the ``width`` most likely nodes are followed by ``width`` guesses each, and of all that were made the K
most likely are the drafts. How likely a path is, the head says itself: its confidence is, on average, how often it is
right. With a temperature that is the softmax of what sampling takes the largest of: what has the noise of its position
far ahead will be ahead in the model's own logits as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.layers import KVCache
from jaxserve.models.decoder import DecoderInput, paged_attend, rotation_of
from jaxserve.sampling import RowState, rank_plainly, score_plainly
from jaxserve.speculative.draft_cache import DraftCache, next_step, tree_step, unseen_step
from jaxserve.speculative.drafts import Proposal
from jaxserve.speculative.eagle_head import EagleHead, fuse, guess_logits, run_head
from jaxserve.speculative.proposer import ProposeInput
from pallas_kernels.work_lists import owner

__all__ = ["EagleProposer"]


@dataclass(frozen=True)
class EagleProposer:
    """K tokens by a head that reads the model's hidden states.

    Its parameters are those of ``eagle_specs``, with the model's ``embed``, ``out`` [W, E] where the head has none of
    its own, and ``vocabulary``: [W] int32, the token that each logit means, or None.

    Attributes:
        num_drafts: K.
        head: what it computes.
        dtype: of its KV, as a numpy name.
        backend: who computes attention.
        width: nodes that are followed at each depth; 1 for a chain.
        depth: drafts on the longest path; K for a chain.
    """

    num_drafts: int
    head: EagleHead
    dtype: str
    backend: str
    width: int
    depth: int
    has_cache: ClassVar[bool] = True

    @property
    def max_depth(self) -> int:
        """The depth."""
        return self.depth

    @property
    def is_tree(self) -> bool:
        """Whether a node may have several guesses after it."""
        return self.width > 1

    @property
    def lookahead(self) -> int:
        """The newest token, and all nodes that are followed."""
        return 1 + (self.depth - 1) * self.width

    @property
    def taps(self) -> tuple[int, ...]:
        """Those of the head."""
        return self.head.taps

    def initial(self, num_rows: int, num_blocks: int, block_size: int) -> DraftCache:
        """An empty KV cache, and nothing seen."""
        return DraftCache.empty(self.head.layer, num_rows, num_blocks, block_size, jnp.dtype(self.dtype))

    def start(self, state: DraftCache, rows: RowState, row: jax.Array, known: jax.Array) -> DraftCache:
        """Nothing is seen of the request yet."""
        return state.started(row)

    def copy(self, state: DraftCache, source: jax.Array, target: jax.Array) -> DraftCache:
        """Copy blocks source [C] over blocks target [C]."""
        return state.copy(source, target)

    def observe(
        self, params: dict[str, Any], state: DraftCache, rows: jax.Array, step: DecoderInput, states: jax.Array
    ) -> DraftCache:
        """Write the KV of a step's tokens."""
        _, kv = self._run(params, step, self._before(params, step, states), state.kv)
        return state.observed(kv, rows, step)

    def propose(
        self, params: dict[str, Any], state: DraftCache, rows: RowState, work: ProposeInput
    ) -> tuple[DraftCache, Proposal]:
        """Chains or trees of K drafts: what the head would sample, with the noise of their positions."""
        step = unseen_step(state, rows, work, self.depth + 1)
        before = self._before(params, step, work.states)
        guessed, kv = self._run(params, step, before, state.kv)
        newest = jnp.maximum(step.plan.query_start[1:] - 1, 0)
        grow = self._tree if self.is_tree else self._chain
        kv, proposal = grow(params, kv, rows, work, _Root(before[newest], guessed[newest]))
        return DraftCache(kv, state.seen.at[work.at].set(rows.length[work.at])), proposal

    def _chain(
        self, params: dict[str, Any], kv: KVCache, rows: RowState, work: ProposeInput, root: _Root
    ) -> tuple[KVCache, Proposal]:
        length, guessed = rows.length[work.at], root.guessed
        drafts: list[jax.Array] = []
        for ahead in range(self.num_drafts):
            if drafts:
                guessed, kv = self._run(params, next_step(drafts[-1], length + ahead - 1, kv, work), guessed, kv)
            scores = guess_logits(params, self.head, guessed, backend=self.backend)
            part = _part(params, rows)
            drafts.append(rank_plainly(scores, work.temperature, work.seeds, length + ahead, part=part)[:, 0])
        return kv, Proposal(jnp.stack(drafts, axis=1))

    def _tree(
        self, params: dict[str, Any], kv: KVCache, rows: RowState, work: ProposeInput, root: _Root
    ) -> tuple[KVCache, Proposal]:
        """The nodes that are followed are computed anew at each depth: they are few, and no cache holds trees."""
        length, width = rows.length[work.at], self.width
        made = _Made.root(rows.last_token[work.at])
        followed = jnp.zeros((length.shape[0], 1), jnp.int32)  # at this depth, by their number among those made
        nodes, above = followed, followed[:, :0]  # followed at all depths, and what each of them follows among these
        before, guessed = root.before[:, None], root.guessed[:, None]
        for ahead in range(self.depth):
            if ahead:
                step = tree_step(_take(made.tokens, nodes), above, length - 1, kv, work)
                flat, kv = self._run(params, step, before.reshape(-1, before.shape[-1]), kv)
                guessed = flat.reshape(before.shape)[:, -width:]
            tokens, likely = self._children(params, rows, work, guessed, length + ahead)
            first = made.tokens.shape[1]
            made, likely = made.grown(followed, tokens, likely)
            best = jax.lax.top_k(likely, min(width, likely.shape[1]))[1].astype(jnp.int32)
            parent = best // width  # among those followed at this depth
            above = jnp.concatenate([above, nodes.shape[1] - followed.shape[1] + parent], axis=1)
            followed = first + best
            nodes = jnp.concatenate([nodes, followed], axis=1)
            before = jnp.concatenate([before, jnp.take_along_axis(guessed, parent[..., None], axis=1)], axis=1)
        return kv, made.most_likely(self.num_drafts)

    def _children(
        self, params: dict[str, Any], rows: RowState, work: ProposeInput, guessed: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The ``width`` best guesses after states [R, n, E], and the logarithms of their chances: [R, n, width]."""
        flat = guess_logits(params, self.head, guessed.reshape(-1, guessed.shape[-1]), backend=self.backend)
        scores, part = flat.reshape(*guessed.shape[:2], -1), _part(params, rows)
        scores = score_plainly(scores, work.temperature, work.seeds, positions, part)
        likely, ranked = jax.lax.top_k(jax.nn.log_softmax(scores), self.width)
        return (ranked.astype(jnp.int32) if part is None else part[0][ranked]), likely

    def _run(
        self, params: dict[str, Any], step: DecoderInput, before: jax.Array, kv: KVCache
    ) -> tuple[jax.Array, KVCache]:
        """States [T, E] guessed at a step's tokens, from those before, and the head's cache."""
        layer = self.head.layer
        attend = paged_attend(kv.layers[0], step, layer, window=None, backend=self.backend)
        guessed, pool = run_head(
            params,
            self.head,
            step.tokens,
            before,
            step.positions,
            rotation_of(step, layer),
            attend,
            backend=self.backend,
        )
        return guessed, KVCache((pool,))

    def _before(self, params: dict[str, Any], step: DecoderInput, states: jax.Array) -> jax.Array:
        """The model's states [T, E] at the tokens before those of a step, as the head reads them."""
        rows = owner(step.plan.query_start[1:], jnp.arange(step.tokens.shape[0]))
        at, block_size = jnp.maximum(step.positions - 1, 0), states.shape[1]
        blocks = step.plan.block_tables[rows, at // block_size]
        return fuse(params, self.head, states[blocks, at % block_size])


class _Root(NamedTuple):
    """The states [R, E] before the newest token of each row, and those guessed at it."""

    before: jax.Array
    guessed: jax.Array


class _Made(NamedTuple):
    """All guesses [R, 1 + M] of a tree in the making; number 0 is the newest token.

    Attributes:
        tokens: int32.
        parents: int32, the number that each follows.
        chances: float32, logarithm of the chance that it is right with all before it.
    """

    tokens: jax.Array
    parents: jax.Array
    chances: jax.Array

    @classmethod
    def root(cls, newest: jax.Array) -> _Made:
        """Nothing but the newest tokens [R]."""
        return cls(newest[:, None], jnp.zeros_like(newest)[:, None], jnp.zeros((newest.shape[0], 1)))

    def grown(self, followed: jax.Array, tokens: jax.Array, likely: jax.Array) -> tuple[_Made, jax.Array]:
        """With guesses [R, n, width] after numbers [R, n], ``likely`` if those are right; and their chances [R, n *
        width]."""
        chances = (_take(self.chances, followed)[..., None] + likely).reshape(likely.shape[0], -1)
        grown = (tokens.reshape(chances.shape), jnp.repeat(followed, tokens.shape[2], axis=1), chances)
        return _Made(*(jnp.concatenate(pair, axis=1) for pair in zip(self, grown, strict=True))), chances

    def most_likely(self, count: int) -> Proposal:
        """The ``count`` most likely; none comes before what it follows, which is as likely, and made earlier."""
        chosen = 1 + jax.lax.top_k(self.chances[:, 1:], count)[1].astype(jnp.int32)
        rows = jnp.arange(chosen.shape[0])[:, None]
        node = jnp.zeros_like(self.tokens).at[rows, chosen].set(jnp.arange(1, 1 + count, dtype=jnp.int32))
        return Proposal(_take(self.tokens, chosen), _take(node, _take(self.parents, chosen)))


def _take(values: jax.Array, at: jax.Array) -> jax.Array:
    """Values [R, n] at [R, n] of [R, M]."""
    return jnp.take_along_axis(values, at, axis=1)


def _part(params: dict[str, Any], rows: RowState) -> tuple[jax.Array, int] | None:
    """The tokens that logits stand for, and how many there are in all, where they are not all."""
    return None if params["vocabulary"] is None else (params["vocabulary"], rows.counts.shape[1])
