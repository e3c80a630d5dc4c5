"""How many KV blocks fit, and how long a context they allow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.errors import ConfigError
from jaxserve.models.config import ModelConfig

__all__ = [
    "KVSize",
    "block_bytes",
    "check_chunking",
    "check_context",
    "check_draft_context",
    "check_ram",
    "fit_context",
    "largest_context",
    "most_useful_blocks",
    "size_cache",
]

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class KVSize:
    """Size of the KV cache: blocks in all, the null block included, bytes per block, and why it is so."""

    num_blocks: int
    block_bytes: int
    reason: str

    @property
    def num_bytes(self) -> int:
        """Of all blocks."""
        return self.num_blocks * self.block_bytes


def block_bytes(models: Sequence[ModelConfig], block_size: int, itemsize: int, state_size: int = 0) -> int:
    """Bytes of one block: keys and values of all layers of all models whose KV lies under the same block ids, in values
    of ``itemsize`` bytes, and ``state_size`` values that are kept of each token beside them."""
    values = sum(2 * model.num_layers * model.num_kv_heads * model.head_dim for model in models)
    return block_size * (values + state_size) * itemsize


def most_useful_blocks(model: ModelConfig, max_model_len: int | None, max_rows: int, block_size: int) -> int:
    """Blocks that ``max_rows`` sequences of the longest context fill, and the null block."""
    return max_rows * -(-(max_model_len or model.max_position) // block_size) + 1


def size_cache(config: CacheConfig, per_block: int, *, most_useful: int, room: Callable[[], tuple[int, str]]) -> KVSize:
    """Size the cache as asked, or by memory; never more than the ``most_useful`` blocks that all rows can fill.

    ``room`` tells the bytes that there are, and by which rule. Raises ConfigError if not even one block fits.
    """
    if config.num_gpu_blocks_override is not None:
        return KVSize(config.num_gpu_blocks_override, per_block, "--num-gpu-blocks-override")
    if config.kv_cache_memory_bytes is not None:
        budget, reason = config.kv_cache_memory_bytes, "--kv-cache-memory-bytes"
    else:
        budget, reason = room()
    count = budget // per_block
    if count < 2:
        raise ConfigError(
            f"no room for KV blocks: {budget / _MIB:.0f} MiB by {reason}, one block takes {per_block / _MIB:.1f} MiB "
            "and at least two are needed."
        )
    if count > most_useful:
        return KVSize(most_useful, per_block, f"all that --max-num-seqs and --max-model-len can use (room by {reason})")
    return KVSize(count, per_block, reason)


def largest_context(size: KVSize, config: CacheConfig, model: ModelConfig) -> int:
    """The longest context in tokens that model and cache allow."""
    return min(model.max_position, (size.num_blocks - 1) * config.block_size)


def check_context(model: ModelConfig, asked: int | None) -> None:
    """ConfigError: the asked length is more than the model was made for."""
    if asked is not None and asked > model.max_position:
        raise ConfigError(
            f"max_model_len {asked} is more than the model's longest context of {model.max_position} tokens.",
            "max_model_len",
        )


def check_draft_context(draft: ModelConfig, max_context: int) -> None:
    """ConfigError: what guesses cannot follow contexts that are served."""
    if draft.max_position < max_context:
        raise ConfigError(
            f"--speculative-model: its longest context is {draft.max_position} tokens, less than the "
            f"{max_context} that are served. Set --max-model-len {draft.max_position} or less."
        )


def fit_context(size: KVSize, config: CacheConfig, model: ModelConfig, asked: int | None) -> int:
    """The longest context in tokens that is served: what was asked, or what model and cache allow.

    Raises:
        ConfigError: the asked length is more than the model was made for, or does not fit, with the length that does.
    """
    check_context(model, asked)
    holds = (size.num_blocks - 1) * config.block_size
    if asked is None:
        return largest_context(size, config, model)
    if asked > holds:
        raise ConfigError(
            f"max_model_len {asked} does not fit: the KV cache of {size.num_blocks} blocks ({size.reason}) holds "
            f"{holds} tokens. Set --max-model-len {holds} or less, or give the cache "
            f"{(-(-asked // config.block_size) + 1) * size.block_bytes} bytes with --kv-cache-memory-bytes.",
            "max_model_len",
        )
    return asked


def check_ram(size: KVSize, rows: int, max_rows: int, free: int) -> None:
    """ConfigError: blocks and ``rows`` bytes of state of ``max_rows`` sequences are more than the ``free`` bytes."""
    if size.num_bytes + rows > free:
        raise ConfigError(
            f"no room: {size.num_blocks} KV blocks take {size.num_bytes / _MIB:.0f} MiB (by {size.reason}) and the "
            f"state of {max_rows} sequences (--max-num-seqs) {rows / _MIB:.0f} MiB, but {free / _MIB:.0f} MiB are free."
        )


def check_chunking(config: SchedulerConfig, max_tokens: int, max_context: int) -> None:
    """ConfigError: prompts are not chunked, and one of ``max_context`` tokens does not fit into a step."""
    if not config.enable_chunked_prefill and max_tokens < max_context:
        raise ConfigError(
            f"without chunked prefill a prompt must fit into one step: --max-num-batched-tokens is {max_tokens}, but "
            f"contexts reach {max_context} tokens. Raise it, or set --max-model-len {max_tokens} or less."
        )
