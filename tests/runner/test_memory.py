"""How many blocks fit on this device, and whether what an engine keeps does."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from jaxserve.config import CacheConfig
from jaxserve.errors import ConfigError
from jaxserve.runner import check_room, fit_blocks
from jaxserve.sizing import KVSize
from jaxserve.speculative import DraftModelProposer, NoProposer, SuffixProposer
from tests.sizing.small import MODEL, PER_BLOCK

FLOAT32 = jnp.dtype("float32")


def test_asked_bytes_give_whole_blocks() -> None:
    size = fit_blocks(CacheConfig(kv_cache_memory_bytes=10 * PER_BLOCK + 5), MODEL, FLOAT32, most_useful=10**6)
    assert (size.num_blocks, size.block_bytes) == (10, PER_BLOCK)


def test_an_asked_number_of_blocks_overrides_bytes() -> None:
    config = CacheConfig(kv_cache_memory_bytes=1, num_gpu_blocks_override=7)
    assert fit_blocks(config, MODEL, FLOAT32, most_useful=3).num_blocks == 7


def test_no_more_blocks_than_all_rows_can_fill() -> None:
    assert fit_blocks(CacheConfig(), MODEL, FLOAT32, most_useful=33).num_blocks == 33


def test_too_little_memory_is_told_in_bytes() -> None:
    with pytest.raises(ConfigError, match=r"no room for KV blocks: .* --kv-cache-memory-bytes"):
        fit_blocks(CacheConfig(kv_cache_memory_bytes=PER_BLOCK), MODEL, FLOAT32, most_useful=10)


def test_what_an_engine_keeps_must_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    state = 33 * 100 * (2 + 4) + 33 * 4 * 4
    monkeypatch.setattr("jaxserve.runner.memory.free_ram", lambda: 10 * PER_BLOCK + state)
    check_room(KVSize(10, PER_BLOCK, "--num-gpu-blocks-override"), MODEL, 32, NoProposer(), 512)
    for blocks, rows in ((11, 32), (10, 33)):
        with pytest.raises(ConfigError, match=rf"{blocks} KV blocks .*--num-gpu.* {rows} sequences \(--max-num-seqs\)"):
            check_room(KVSize(blocks, PER_BLOCK, "--num-gpu-blocks-override"), MODEL, rows, NoProposer(), 512)


def test_what_a_proposer_keeps_counts_but_for_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, state = KVSize(10, PER_BLOCK, "--num-gpu-blocks-override"), 33 * 100 * (2 + 4) + 33 * 4 * 4
    history, corpus = 33 * (512 + 3) * 4, (1000 + 1 + 33) * 4
    for proposer, more in (
        (SuffixProposer(3, 4, 2, corpus_size=1000), history + corpus),
        (DraftModelProposer(3, MODEL, "float32", "reference"), history + 33 * 4),
    ):
        monkeypatch.setattr("jaxserve.runner.memory.free_ram", lambda more=more: 10 * PER_BLOCK + state + more)
        check_room(blocks, MODEL, 32, proposer, 512)
        with pytest.raises(ConfigError, match="no room"):
            check_room(blocks, MODEL, 32, proposer, 513)
