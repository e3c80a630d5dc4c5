"""A smaller model of the same vocabulary writes ahead (Leviathan et al. 2023, arXiv:2211.17192)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import DecoderInput, decode, logits
from jaxserve.sampling import RowState, sample_plainly
from jaxserve.speculative.draft_cache import DraftCache, next_step, unseen_step
from jaxserve.speculative.drafts import Proposal
from jaxserve.speculative.proposer import ProposeInput

__all__ = ["DraftModelProposer"]


@dataclass(frozen=True)
class DraftModelProposer:
    """A chain of K tokens by a model of its own.

    Attributes:
        num_drafts: K.
        config: the draft model.
        dtype: of its KV, as a numpy name.
        backend: who computes attention.
    """

    num_drafts: int
    config: ModelConfig
    dtype: str
    backend: str
    is_tree: ClassVar[bool] = False
    has_cache: ClassVar[bool] = True
    taps: ClassVar[None] = None

    @property
    def max_depth(self) -> int:
        """K."""
        return self.num_drafts

    @property
    def lookahead(self) -> int:
        """The newest token, and all drafts but the last."""
        return self.num_drafts

    def initial(self, num_rows: int, num_blocks: int, block_size: int) -> DraftCache:
        """An empty KV cache, and nothing seen."""
        return DraftCache.empty(self.config, num_rows, num_blocks, block_size, jnp.dtype(self.dtype))

    def start(self, state: DraftCache, rows: RowState, row: jax.Array, known: jax.Array) -> DraftCache:
        """Nothing is seen of the request yet."""
        return state.started(row)

    def copy(self, state: DraftCache, source: jax.Array, target: jax.Array) -> DraftCache:
        """Copy blocks source [C] over blocks target [C]."""
        return state.copy(source, target)

    def observe(self, params: Any, state: DraftCache, rows: jax.Array, step: DecoderInput, states: None) -> DraftCache:
        """Write the KV of a step's tokens."""
        _, kv = decode(params, self.config, step, state.kv, backend=self.backend)
        return state.observed(kv, rows, step)

    def propose(
        self, params: Any, state: DraftCache, rows: RowState, work: ProposeInput
    ) -> tuple[DraftCache, Proposal]:
        """Chains of K drafts: each is what the draft model would sample, with the noise of its position."""
        length = rows.length[work.at]
        step = unseen_step(state, rows, work, self.num_drafts + 1)
        last = jnp.maximum(step.plan.query_start[1:] - 1, 0)
        kv, drafts = state.kv, []
        for ahead in range(self.num_drafts):
            hidden, kv = decode(params, self.config, step, kv, backend=self.backend)
            scores = logits(params, hidden[last])
            drafts.append(sample_plainly(scores, work.temperature, work.seeds, length + ahead))
            step, last = next_step(drafts[-1], length + ahead, kv, work), jnp.arange(length.shape[0])
        state = DraftCache(kv, state.seen.at[work.at].set(length))
        return state, Proposal(jnp.stack(drafts, axis=1))
