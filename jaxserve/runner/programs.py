"""The pure device functions of a step: ``forward``, ``sample``, ``propose``, and small ones for rare work.

They are compiled once per bucket (see ``compiled``) and hold no state; what they change comes in donated and goes out.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.layers import KVCache
from jaxserve.lora.bank import LoraInput, adapt, adapt_head
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import DecoderInput, decode, logits
from jaxserve.models.ragged import ragged_step
from jaxserve.plan import DEVICE_TOKEN
from jaxserve.runner.batch import StepInput
from jaxserve.runner.buckets import Bucket
from jaxserve.runner.reader import chunks_of
from jaxserve.sampling import RowState, Sampled, SamplingInput
from jaxserve.sampling import sample as sample_logits
from jaxserve.speculative import (
    DraftState,
    Proposal,
    ProposeInput,
    Proposer,
    TypicalAcceptance,
    find_places,
    find_reached,
    lineage,
)

__all__ = [
    "Newest",
    "compact",
    "copy_blocks",
    "decoder_input",
    "forward",
    "load_row",
    "observe",
    "propose",
    "sample",
    "start_row",
]


class Newest(NamedTuple):
    """What only the device knows of the rows: newest token [X], length [X] (that token included), and drafts."""

    token: jax.Array
    length: jax.Array
    drafts: DraftState


def forward(
    params: dict[str, Any],
    kv: KVCache,
    newest: Newest,
    step: StepInput,
    lora: LoraInput | None = None,
    *,
    config: ModelConfig,
    bucket: Bucket,
    max_places: int,
    backend: str,
    taps: tuple[int, ...] = (),
) -> tuple[KVCache, jax.Array, tuple[jax.Array, ...]]:
    """Run the decoder over a step's tokens, with the adapters ``lora`` of its rows if any of them has one.

    Returns the updated cache, the hidden states of ``step.outputs``, [max_places, E] in every bucket, so that the
    sample programs need not exist once per forward bucket, and those of all tokens in chunks (see ``reader``).
    """
    inputs = decoder_input(step, newest, kv, bucket)
    if lora is not None:
        is_real = jnp.arange(step.tokens.shape[0]) < step.query_start[-1]
        params = adapt(params, lora.bank, jnp.where(is_real, lora.slots[step.token_rows], 0))
    hidden, kv = decode(params, config, inputs, kv, backend=backend, taps=taps)
    kept = hidden[step.outputs]
    outputs = jnp.zeros((max_places, hidden.shape[1]), hidden.dtype).at[: kept.shape[0]].set(kept)
    return kv, outputs, chunks_of(hidden)


def decoder_input(step: StepInput, newest: Newest, kv: KVCache, bucket: Bucket) -> DecoderInput:
    """Tokens, positions and slots of a step, and its attention plan."""
    rows = step.rows[step.token_rows]
    start = jnp.where(step.start < 0, newest.length[step.rows] - 1, step.start)
    drafts = newest.drafts.token(rows, DEVICE_TOKEN - step.tokens)
    unknown = jnp.where(step.tokens == DEVICE_TOKEN, newest.token[rows], drafts)
    tokens = jnp.where(step.tokens >= 0, step.tokens, unknown)
    depth, tree = _trees(step, newest.drafts) if bucket.queries > 1 else (None, None)
    return ragged_step(
        jnp.maximum(tokens, 0),
        step.token_rows,
        step.query_start,
        start,
        step.block_tables,
        step.num_decode,
        kv,
        queries=bucket.queries,
        has_prefill=bucket.has_prefill,
        depth=depth,
        tree=tree,
    )


def _trees(step: StepInput, drafts: DraftState) -> tuple[jax.Array, jax.Array] | tuple[None, None]:
    """How deep in its row's tree each token [T] stands, and the ``AttentionPlan.tree`` of the step; None for chains.

    Rows that verify nothing are chains, also among others; a bucket without room for drafts has none of those.
    """
    if drafts.lineage is None:
        return None, None
    index = jnp.arange(step.tokens.shape[0], dtype=jnp.int32) - step.query_start[step.token_rows]
    depth = drafts.depth(step.rows[step.token_rows], DEVICE_TOKEN - step.tokens)
    chain = lineage(jnp.arange(drafts.width, dtype=jnp.int32)[None])
    tree = jnp.where(_verifies(step)[:, None, None], drafts.lineage[step.rows], chain)
    return jnp.where(step.tokens < DEVICE_TOKEN, depth, index), tree


def _verifies(step: StepInput) -> jax.Array:
    """Which rows [R] have drafts."""
    return step.tokens[jnp.maximum(step.query_start[1:] - 1, 0)] < DEVICE_TOKEN


def sample(
    params: dict[str, Any],
    rows: RowState,
    drafts: DraftState,
    hidden: jax.Array,
    sampling: SamplingInput,
    mask: jax.Array,
    masked: jax.Array,
    lora: LoraInput | None = None,
    *,
    typical: TypicalAcceptance | None = None,
) -> tuple[RowState, Sampled, jax.Array]:
    """Sample at every place of a step, and keep what follows right drafts.

    ``hidden`` [max_places, E] holds the places' hidden states first, ``lora`` the places' adapters if any changes the
    output head; ``typical`` says which other drafts count as right; the other arguments are those of
    ``sampling.sample``. Returns the rows, what was sampled, and which places [P] were reached.
    """
    places = find_places(drafts, sampling)
    first = jnp.where(sampling.positions < 0, rows.length[sampling.rows], sampling.positions)
    positions = first + places.depth
    if lora is not None:
        params = adapt_head(params, lora.bank, lora.slots)
    scores = logits(params, hidden[: sampling.nodes.shape[0]])
    revise = None if typical is None else partial(typical.revise, places, sampling, drafts.width)
    sampled = sample_logits(
        scores, rows, sampling, mask, masked, positions=positions, context=places.context, revise=revise
    )
    reached, newest = find_reached(places, sampled.tokens, drafts.width)
    return rows.record(sampling, sampled.tokens, positions, places.depth, reached, newest), sampled, reached


def propose(
    params: Any, drafts: DraftState, state: Any, rows: RowState, work: ProposeInput, *, proposer: Proposer
) -> tuple[DraftState, Any, Proposal]:
    """Put new drafts on the rows of ``work``; they are returned as well."""
    state, proposal = proposer.propose(params, state, rows, work)
    return drafts.put(work.at, proposal), state, proposal


def observe(
    params: Any,
    state: Any,
    rows: RowState,
    step: StepInput,
    states: jax.Array | None,
    *,
    proposer: Proposer,
    bucket: Bucket,
) -> Any:
    """Show a step's tokens to a proposer with a cache of its own: those of the rows' histories, rejected drafts too."""
    # The step has been sampled: what the rows were before is shorter by the tokens that this gave.
    before = rows.length - rows.path_length
    newest = Newest(rows.last_token, before, DraftState.empty(rows.length.shape[0] - 1, 0))
    inputs = decoder_input(step, newest, state.kv, bucket)
    history = rows.history.at[step.rows[step.token_rows], inputs.positions].get(mode="fill", fill_value=0)
    # Rows with drafts stay as they were: which of these are right is not known here, and ``propose`` shows them anew.
    shown = jnp.where(_verifies(step), rows.length.shape[0], step.rows)
    return proposer.observe(params, state, shown, replace(inputs, tokens=history), states)


def load_row(rows: RowState, row: jax.Array, counts: jax.Array, bias: jax.Array) -> RowState:
    """Set counts [V] and bias [V] of one row, for a request that was just given it."""
    return replace(rows, counts=rows.counts.at[row].set(counts), bias=rows.bias.at[row].set(bias))


def start_row(
    rows: RowState,
    drafts: DraftState,
    state: Any,
    row: jax.Array,
    history: jax.Array,
    known: tuple[jax.Array, jax.Array],
    *,
    proposer: Proposer,
) -> tuple[RowState, DraftState, Any]:
    """Set the history [C] of one row, for a request that was just given it, and drop the drafts of the one before.

    ``known`` is how many tokens of it there are, and how many the proposer is told.
    """
    length, told = known
    state = proposer.start(state, rows, row, told)
    rows = replace(rows, history=rows.history.at[row].set(history), length=rows.length.at[row].set(length))
    return rows, drafts.drop(row), state


def copy_blocks(kv: KVCache, source: jax.Array, target: jax.Array) -> KVCache:
    """Copy blocks source [C] over blocks target [C] in all layers."""
    return kv.copy(source, target)


def compact(kv: KVCache, rows: RowState, at: jax.Array, block_tables: jax.Array, *, backend: str) -> KVCache:
    """Close the gaps between the right drafts of the newest step of rows at [R] with block_tables [R, B].

    A node's KV lies as many slots behind that of the row's newest token as it has nodes before it; it moves to as many
    as it has drafts before it.
    """
    path, path_length = rows.path[at], rows.path_length[at, None]
    start = rows.length[at, None] - 1 - path_length  # position of the token that was the newest
    depth = jnp.arange(1, path.shape[1], dtype=jnp.int32)
    source, target = start + path[:, 1:] - path[:, :1], start + depth
    moves = (depth < path_length) & (source != target)

    def slots(positions: jax.Array) -> jax.Array:
        known = jnp.where(moves, positions, 0)
        return jnp.take_along_axis(block_tables, known // kv.block_size, axis=1) * kv.block_size + known % kv.block_size

    # Distinct out-of-range slots for what stays: the scatter is told that its indices are unique.
    nowhere = kv.num_slots + jnp.arange(moves.size, dtype=jnp.int32)
    return kv.move(slots(source).ravel(), jnp.where(moves.ravel(), slots(target).ravel(), nowhere), backend=backend)
