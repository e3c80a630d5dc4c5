"""What guesses the next tokens: the one interface of all methods of speculation."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
from flax import struct

from jaxserve.models.decoder import DecoderInput
from jaxserve.sampling import RowState
from jaxserve.speculative.drafts import Proposal

__all__ = ["Cacheless", "NoProposer", "ProposeInput", "Proposer"]


@struct.dataclass
class ProposeInput:
    """The rows whose next tokens are to be guessed; numpy on the way in. R rows, B blocks per row.

    Attributes:
        at: [R] int32, index in the row state (the dummy for padding).
        is_real: [R] bool, False for padding, which comes last.
        block_tables: [R, B] int32.
        seeds: [R, 2] uint32, halves of the 64-bit seed.
        temperature: [R] float32.
        hidden: [max_places, E], the model's hidden states at each place of the step; ``RowState.path`` says which
            places are a row's.
        states: [N, S, Z], the model's hidden states at each slot, if the proposer has ``taps``, else None.
    """

    at: Any
    is_real: Any
    block_tables: Any
    seeds: Any
    temperature: Any
    hidden: Any
    states: Any


class Proposer(Protocol):
    """Guesses on the device; its methods are pure and traced.

    Attributes:
        num_drafts: K, most drafts of a row.
        max_depth: most drafts on a path, which are as many as can be right at once: K for chains.
        is_tree: whether its proposals have parents.
        has_cache: whether it has a KV cache of its own, which ``observe`` fills.
        lookahead: how many tokens, from a row's newest on, it writes to that while it guesses.
        taps: the model's layers whose inputs it reads, none for its final states; None if it reads no states but
            those of the newest step.
    """

    @property
    def num_drafts(self) -> int: ...

    @property
    def max_depth(self) -> int: ...

    @property
    def is_tree(self) -> bool: ...

    @property
    def has_cache(self) -> bool: ...

    @property
    def lookahead(self) -> int: ...

    @property
    def taps(self) -> tuple[int, ...] | None: ...

    def initial(self, num_rows: int, num_blocks: int, block_size: int) -> Any:
        """Its own state, a pytree, for num_rows rows and the dummy, and a pool of blocks like the model's."""

    def start(self, state: Any, rows: RowState, row: jax.Array, known: jax.Array) -> Any:
        """New state, as row ``row`` of ``rows`` is given to another request; what the last one left is still there.

        ``known`` is how many tokens the new request begins with. Drafts of others may be made of those that follow;
        where that is not allowed, it is more than there will be.
        """

    def copy(self, state: Any, source: jax.Array, target: jax.Array) -> Any:
        """New state in which blocks source [C] are copied over blocks target [C]."""

    def observe(self, params: Any, state: Any, rows: jax.Array, step: DecoderInput, states: Any) -> Any:
        """New state that knows the tokens of a step; rows [R] are its rows in the row state, or out of range.

        ``states`` are as in ``ProposeInput``.
        """

    def propose(self, params: Any, state: Any, rows: RowState, work: ProposeInput) -> tuple[Any, Proposal]:
        """New state, and drafts of what follows the newest token of each row."""


class Cacheless:
    """The hooks of a proposer without a KV cache, which knows no more than rows and the newest step tell."""

    has_cache: ClassVar[bool] = False
    lookahead: ClassVar[int] = 0
    taps: ClassVar[tuple[int, ...] | None] = None

    def initial(self, num_rows: int, num_blocks: int, block_size: int) -> Any:
        """Nothing to remember."""
        return None

    def start(self, state: Any, rows: RowState, row: jax.Array, known: jax.Array) -> Any:
        """Nothing to forget."""
        return state

    def copy(self, state: Any, source: jax.Array, target: jax.Array) -> Any:
        """There are no blocks."""
        return state

    def observe(self, params: Any, state: Any, rows: jax.Array, step: DecoderInput, states: None) -> Any:
        """What is known of the rows is kept anyway."""
        return state


class NoProposer(Cacheless):
    """Speculation switched off: it guesses nothing."""

    num_drafts = 0
    max_depth = 0
    is_tree = False

    def propose(self, params: None, state: None, rows: RowState, work: ProposeInput) -> tuple[None, Proposal]:
        """No drafts."""
        return None, Proposal(jnp.zeros((work.at.shape[0], 0), jnp.int32))
