"""Which tokens use which adapter, made once per step and shared by all products of all layers.

Adapters lie in the slots of a bank; slot 0 is none. Tokens are put in order of their slots, those of one slot in the
order of the step, and each slot's tokens are cut into tiles, so that a tile is two plain products with one adapter's
matrices. Lists have a fixed shape and a dynamic length.

Letters: T tokens, n slots, W tiles.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from pallas_kernels.work_lists import items

__all__ = ["TILE", "LoraPlan", "make_plan"]

TILE = 32
"""Tokens of a tile: fewer would read adapters too often, more would leave too few tiles for a chip."""


@struct.dataclass
class LoraPlan:
    """Tiles of one step. A backend takes what it needs; under jit the rest costs nothing.

    Attributes:
        slots: [T] int32, slot of each token; 0 for tokens without an adapter, padding included.
        order: [T] int32, tokens by slot: those without an adapter first.
        tile_slot: [W] int32, slot of each tile.
        tile_start: [W] int32, where its tokens begin in ``order``.
        tile_end: [W] int32, where they end.
        num_tiles: [] int32, how many tiles there are.
    """

    slots: jax.Array
    order: jax.Array
    tile_slot: jax.Array
    tile_start: jax.Array
    tile_end: jax.Array
    num_tiles: jax.Array


def make_plan(slots: jax.Array, num_slots: int) -> LoraPlan:
    """Make the tiles for slots [T] int32, each in 0..num_slots - 1. Pure: call it inside a jitted step, once."""
    num_tokens = slots.shape[0]
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    # A token's place is the number of tokens before it: one reduction, where a sort would be many launches.
    before = (slots[None, :] < slots[:, None]) | (
        (slots[None, :] == slots[:, None]) & (token[None, :] < token[:, None])
    )
    place = before.sum(1, dtype=jnp.int32)
    counts = (slots[None, :] == jnp.arange(num_slots)[:, None]).sum(1, dtype=jnp.int32)
    tiles = -(-counts // TILE)
    slot, index, num_tiles = items(tiles, num_tokens // TILE + min(num_slots, num_tokens))
    ends = jnp.cumsum(counts)
    start = ends[slot] - counts[slot] + index * TILE
    return LoraPlan(
        slots=slots,
        order=jnp.zeros_like(token).at[place].set(token, unique_indices=True),
        tile_slot=slot,
        tile_start=start.astype(jnp.int32),
        tile_end=jnp.minimum(start + TILE, ends[slot]).astype(jnp.int32),
        num_tiles=num_tiles,
    )
