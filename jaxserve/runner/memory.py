"""How many KV blocks fit, and how long a context they allow."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxserve.config import CacheConfig
from jaxserve.errors import ConfigError
from jaxserve.lora.layout import Layout
from jaxserve.models.config import ModelConfig
from jaxserve.sampling import RowState
from jaxserve.speculative import Proposer

__all__ = ["KVSize", "block_bytes", "check_adapter_room", "check_room", "fit_blocks", "fit_context", "no_room"]

_CPU_SHARE = 0.25
_CPU_LIMIT = 4 << 30
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class KVSize:
    """Size of the KV cache: blocks in all, the null block included, bytes per block, and why it is so."""

    num_blocks: int
    block_bytes: int
    reason: str


@contextmanager
def no_room(why: str) -> Iterator[None]:
    """Where the device runs out of memory, ConfigError says ``why``."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ConfigError(why) from error


def block_bytes(model: ModelConfig, block_size: int, dtype: jnp.dtype) -> int:
    """Bytes of one block over all layers, keys and values."""
    return 2 * model.num_layers * block_size * model.num_kv_heads * model.head_dim * jnp.dtype(dtype).itemsize


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
    per_block = sum(block_bytes(each, config.block_size, dtype) for each in (model, *others))
    per_block += config.block_size * state_size * jnp.dtype(dtype).itemsize
    if config.num_gpu_blocks_override is not None:
        return KVSize(config.num_gpu_blocks_override, per_block, "--num-gpu-blocks-override")
    if config.kv_cache_memory_bytes is not None:
        budget, reason = config.kv_cache_memory_bytes, "--kv-cache-memory-bytes"
    else:
        budget, reason = _free_memory(config)
    count = budget // per_block
    if count < 2:
        raise ConfigError(
            f"no room for KV blocks: {budget / _MIB:.0f} MiB by {reason}, one block takes {per_block / _MIB:.1f} MiB "
            "and at least two are needed."
        )
    if count > most_useful:
        return KVSize(most_useful, per_block, f"all that --max-num-seqs and --max-model-len can use (room by {reason})")
    return KVSize(count, per_block, reason)


def fit_context(size: KVSize, config: CacheConfig, model: ModelConfig, asked: int | None) -> int:
    """The longest context in tokens that is served: what was asked, or what model and cache allow.

    Raises:
        ConfigError: the asked length is more than the model was made for, or does not fit, with the length that does.
    """
    if asked is not None and asked > model.max_position:
        raise ConfigError(
            f"max_model_len {asked} is more than the model's longest context of {model.max_position} tokens.",
            "max_model_len",
        )
    holds = (size.num_blocks - 1) * config.block_size
    if asked is None:
        return min(model.max_position, holds)
    if asked > holds:
        raise ConfigError(
            f"max_model_len {asked} does not fit: the KV cache of {size.num_blocks} blocks ({size.reason}) holds "
            f"{holds} tokens. Set --max-model-len {holds} or less, or give the cache "
            f"{(-(-asked // config.block_size) + 1) * size.block_bytes} bytes with --kv-cache-memory-bytes.",
            "max_model_len",
        )
    return asked


def check_room(size: KVSize, model: ModelConfig, max_rows: int, proposer: Proposer, max_context: int) -> None:
    """ConfigError: what an engine keeps between steps is more than a CPU has memory for.

    What a proposer keeps counts as well, but for its KV, which the blocks have counted.
    There an allocation succeeds whatever its size, and the system ends the process when it is filled; accelerators
    refuse.
    """
    if jax.default_backend() != "cpu":
        return
    blocks = size.num_blocks * size.block_bytes
    history = max_context if proposer.num_drafts else 0
    state = jax.eval_shape(
        lambda: (RowState.zeros(max_rows, model.vocab_size, history), proposer.initial(max_rows, 0, 1))
    )
    rows = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    free = _free_ram()
    if blocks + rows > free:
        raise ConfigError(
            f"no room: {size.num_blocks} KV blocks take {blocks / _MIB:.0f} MiB (by {size.reason}) and the state of "
            f"{max_rows} sequences (--max-num-seqs) {rows / _MIB:.0f} MiB, but {free / _MIB:.0f} MiB are free."
        )


def check_adapter_room(layout: Layout, num_slots: int) -> None:
    """ConfigError: the slots for adapters are more than a CPU has memory for (see ``check_room``)."""
    wanted = num_slots * layout.slot_bytes
    if jax.default_backend() == "cpu" and wanted > (free := _free_ram()):
        raise ConfigError(
            f"no room: {num_slots} slots for adapters (--max-loras) of rank {layout.max_rank} (--max-lora-rank) take "
            f"{wanted / _MIB:.0f} MiB, but {free / _MIB:.0f} MiB are free."
        )


def _free_memory(config: CacheConfig) -> tuple[int, str]:
    device = jax.local_devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        share = config.gpu_memory_utilization
        free = int(stats["bytes_limit"] * share) - stats["bytes_in_use"]
        return free, f"--gpu-memory-utilization {share:g}"
    share = min(int(_free_ram() * _CPU_SHARE), _CPU_LIMIT)
    return share, f"{_CPU_SHARE:.0%} of free memory, at most {_CPU_LIMIT >> 30} GiB"


def _free_ram() -> int:
    """Bytes that a process can still have; Linux counts among them what caches files and can be dropped."""
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file() and (found := re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())):
        return int(found[1]) << 10
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
