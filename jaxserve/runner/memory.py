"""How many KV blocks fit, and how long a context they allow."""

from __future__ import annotations

import os
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxserve.config import CacheConfig
from jaxserve.errors import ConfigError
from jaxserve.models.config import ModelConfig

__all__ = ["KVSize", "block_bytes", "fit_blocks", "fit_context"]

_CPU_SHARE = 0.25
_CPU_LIMIT = 4 << 30
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class KVSize:
    """Size of the KV cache: blocks in all, the null block included, bytes per block, and why it is so."""

    num_blocks: int
    block_bytes: int
    reason: str


def block_bytes(model: ModelConfig, block_size: int, dtype: jnp.dtype) -> int:
    """Bytes of one block over all layers, keys and values."""
    return 2 * model.num_layers * block_size * model.num_kv_heads * model.head_dim * jnp.dtype(dtype).itemsize


def fit_blocks(config: CacheConfig, model: ModelConfig, dtype: jnp.dtype, *, most_useful: int) -> KVSize:
    """Size the cache as asked, or by free memory; never more than the ``most_useful`` blocks all rows can fill.

    Call it when the weights are on the device. Raises ConfigError if not even one block fits.
    """
    per_block = block_bytes(model, config.block_size, dtype)
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
            f"max_model_len {asked} is more than the model's longest context of {model.max_position} tokens."
        )
    holds = (size.num_blocks - 1) * config.block_size
    if asked is None:
        return min(model.max_position, holds)
    if asked > holds:
        raise ConfigError(
            f"max_model_len {asked} does not fit: the KV cache of {size.num_blocks} blocks ({size.reason}) holds "
            f"{holds} tokens. Set --max-model-len {holds} or less, or give the cache "
            f"{(-(-asked // config.block_size) + 1) * size.block_bytes} bytes with --kv-cache-memory-bytes."
        )
    return asked


def _free_memory(config: CacheConfig) -> tuple[int, str]:
    device = jax.local_devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        share = config.gpu_memory_utilization
        free = int(stats["bytes_limit"] * share) - stats["bytes_in_use"]
        return free, f"--gpu-memory-utilization {share:g}"
    ram = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(int(ram * _CPU_SHARE), _CPU_LIMIT), f"{_CPU_SHARE:.0%} of free memory, at most {_CPU_LIMIT >> 30} GiB"
