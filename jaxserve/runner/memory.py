"""How many KV blocks fit on the device that is there: the arithmetic of ``sizing`` over what it says of itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import jax
import jax.numpy as jnp

from jaxserve.config import CacheConfig
from jaxserve.errors import ConfigError
from jaxserve.lora.layout import Layout
from jaxserve.models.config import ModelConfig
from jaxserve.sizing import KVSize, block_bytes, check_ram, cpu_room, free_ram, gpu_room, row_bytes, size_cache
from jaxserve.speculative import Proposer

__all__ = ["check_adapter_room", "check_room", "fit_blocks", "no_room"]

_MIB = 1 << 20


@contextmanager
def no_room(why: str) -> Iterator[None]:
    """Where the device runs out of memory, ConfigError says ``why``."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ConfigError(why) from error


def fit_blocks(
    config: CacheConfig,
    model: ModelConfig,
    dtype: jnp.dtype,
    *,
    most_useful: int,
    others: Sequence[ModelConfig] = (),
    state_size: int = 0,
) -> KVSize:
    """Size the cache as asked, or by free memory; never more than the ``most_useful`` blocks all rows can fill.

    ``others`` are models whose KV lies under the same block ids, and ``state_size`` values are kept of each token
    beside it. Call it when the weights are on the device. Raises ConfigError if not even one block fits.
    """
    per_block = block_bytes((model, *others), config.block_size, jnp.dtype(dtype).itemsize, state_size)
    return size_cache(config, per_block, most_useful=most_useful, room=lambda: _room(config.gpu_memory_utilization))


def check_room(size: KVSize, model: ModelConfig, max_rows: int, proposer: Proposer, max_context: int) -> None:
    """ConfigError: what an engine keeps between steps is more than a CPU has memory for.

    What a proposer keeps counts as well, but for its KV, which the blocks have counted.
    There an allocation succeeds whatever its size, and the system ends the process when it is filled; accelerators
    refuse.
    """
    if jax.default_backend() != "cpu":
        return
    history = max_context if proposer.num_drafts else 0
    kept = jax.eval_shape(lambda: proposer.initial(max_rows, 0, 1))
    rows = row_bytes(max_rows, model.vocab_size, history, proposer.max_depth)
    rows += sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept))
    check_ram(size, rows, max_rows, free_ram())


def check_adapter_room(layout: Layout, num_slots: int) -> None:
    """ConfigError: the slots for adapters are more than a CPU has memory for (see ``check_room``)."""
    wanted = num_slots * layout.slot_bytes
    if jax.default_backend() == "cpu" and wanted > (free := free_ram()):
        raise ConfigError(
            f"no room: {num_slots} slots for adapters (--max-loras) of rank {layout.max_rank} (--max-lora-rank) take "
            f"{wanted / _MIB:.0f} MiB, but {free / _MIB:.0f} MiB are free."
        )


def _room(utilization: float) -> tuple[int, str]:
    """Bytes for KV on the device as it is now, and by which rule."""
    device = jax.local_devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return gpu_room(int(stats["bytes_limit"]), int(stats["bytes_in_use"]), utilization)
    return cpu_room(free_ram())
