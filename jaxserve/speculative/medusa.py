"""Heads beside the model's own that guess the tokens after the next (Cai et al. 2024, arXiv:2401.10774).

A hidden state of position t gives token t + 1 through the model's head and token t + 2 + i through head i. So when a
token was just sampled, the state that it was sampled from says what may follow, at the price of a few products. There
is no cache, and nothing to catch up with.

Each head guesses on its own, without knowing what the others have guessed. A static tree makes up for some of that: its
nodes are paths of ranks, (0, 2) for the third guess of head 1 after the first of head 0, the most promising first. The
chain (0), (0, 0), … is the tree that needs no care.

A head may know a part of the vocabulary only: what it leaves out is never guessed, and costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.layers import linear, unembed
from jaxserve.models.params import ParamTree
from jaxserve.models.spec import ParamSpec, Source, Transform, Use
from jaxserve.sampling import RowState, rank_plainly
from jaxserve.speculative.drafts import Proposal
from jaxserve.speculative.proposer import Cacheless, ProposeInput

__all__ = ["MedusaProposer", "head_logits", "medusa_specs"]


@dataclass(frozen=True)
class MedusaProposer(Cacheless):
    """A static tree of K tokens.

    Its parameters are ``{"heads": [head, …], "vocabulary": [W] int32 or None}``: a head is what ``medusa_specs``
    declares, and the vocabulary says which token each of its W logits means.

    Attributes:
        paths: K paths, the most promising first and none before its beginning. The longest has a head per place.
    """

    paths: tuple[tuple[int, ...], ...]

    @property
    def num_drafts(self) -> int:
        """K."""
        return len(self.paths)

    @property
    def max_depth(self) -> int:
        """The number of heads in use."""
        return max(map(len, self.paths))

    @property
    def is_tree(self) -> bool:
        """Whether it is more than a chain."""
        return self.max_depth < self.num_drafts

    def propose(self, params: dict[str, Any], state: None, rows: RowState, work: ProposeInput) -> tuple[None, Proposal]:
        """Trees of K drafts: what the heads would sample, with the noise of their positions."""
        newest = rows.path[work.at, rows.path_length[work.at] - 1]
        hidden, length = work.hidden[newest], rows.length[work.at]
        vocabulary = params["vocabulary"]
        ranked = [
            rank_plainly(
                head_logits(head, hidden),
                work.temperature,
                work.seeds,
                length + depth,
                count=1 + max(path[depth] for path in self.paths if len(path) > depth),
                part=None if vocabulary is None else (vocabulary, rows.counts.shape[1]),
            )
            for depth, head in enumerate(params["heads"][: self.max_depth])
        ]
        tokens = jnp.stack([ranked[len(path) - 1][:, path[-1]] for path in self.paths], axis=1)
        if not self.is_tree:
            return None, Proposal(tokens)
        node = {path: i for i, path in enumerate(((), *self.paths))}
        parents = jnp.array([node[path[:-1]] for path in self.paths], jnp.int32)
        return None, Proposal(tokens, jnp.broadcast_to(parents, tokens.shape))


def head_logits(head: dict[str, Any], hidden: jax.Array) -> jax.Array:
    """What a head makes of hidden states [R, E] after the final norm: logits [R, W] float32."""
    for block in head["blocks"]:
        hidden = hidden + jax.nn.silu(linear(hidden, block["weight"], block["bias"]))
    return unembed(hidden, head["out"])


def medusa_specs(num_heads: int, num_layers: int, hidden_size: int, num_known: int | None) -> list[ParamTree]:
    """The parameters of heads, with the names that the authors' checkpoints have: ``{"blocks": [{"weight": [E, E],
    "bias": [E]} x num_layers], "out": [W, E]}`` each. W is ``num_known``; None for heads without "out"."""
    heads: list[ParamTree] = []
    for head in range(num_heads):
        heads.append({"blocks": [_block(f"{head}.{layer}.linear", hidden_size) for layer in range(num_layers)]})
        if num_known is not None:
            heads[-1]["out"] = _table(f"{head}.{num_layers}.weight", (num_known, hidden_size))
    return heads


def _block(name: str, size: int) -> ParamTree:
    weight = Source(f"{name}.weight", (size, size), Transform.TRANSPOSE)
    return {
        "weight": ParamSpec((size, size), ("embed", None), (weight,), Use.MATRIX),
        "bias": ParamSpec((size,), (None,), (Source(f"{name}.bias", (size,)),)),
    }


def _table(name: str, shape: tuple[int, int]) -> ParamSpec:
    return ParamSpec(shape, ("vocab", "embed"), (Source(name, shape),), Use.LOGITS)
