"""How many blocks fit, and how long a context they allow."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import pytest

from jaxserve.config import CacheConfig
from jaxserve.errors import ConfigError
from jaxserve.models import ModelConfig
from jaxserve.runner import KVSize, check_room, fit_blocks, fit_context
from jaxserve.runner.memory import block_bytes
from jaxserve.speculative import DraftModelProposer, NoProposer, SuffixProposer

MODEL = ModelConfig(
    family="llama",
    vocab_size=100,
    hidden_size=64,
    intermediate_size=128,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position=512,
)
FLOAT32 = jnp.dtype("float32")
PER_BLOCK = 2 * 3 * 16 * 2 * 16 * 4


def test_a_block_holds_keys_and_values_of_all_layers() -> None:
    assert block_bytes(MODEL, 16, FLOAT32) == PER_BLOCK
    assert block_bytes(MODEL, 16, jnp.dtype("bfloat16")) == PER_BLOCK // 2
    llama_70b = dataclasses.replace(MODEL, num_layers=80, num_kv_heads=8, head_dim=128)
    assert block_bytes(llama_70b, 1, jnp.dtype("float16")) == 320 * 1024


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
    monkeypatch.setattr("jaxserve.runner.memory._free_ram", lambda: 10 * PER_BLOCK + state)
    check_room(KVSize(10, PER_BLOCK, "--num-gpu-blocks-override"), MODEL, 32, NoProposer(), 512)
    for blocks, rows in ((11, 32), (10, 33)):
        with pytest.raises(ConfigError, match=rf"{blocks} KV blocks .*--num-gpu.* {rows} sequences \(--max-num-seqs\)"):
            check_room(KVSize(blocks, PER_BLOCK, "--num-gpu-blocks-override"), MODEL, rows, NoProposer(), 512)


def test_what_a_proposer_keeps_counts_but_for_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, state = KVSize(10, PER_BLOCK, "--num-gpu-blocks-override"), 33 * 100 * (2 + 4) + 33 * 4 * 4
    history, corpus = 33 * 512 * 4, (1000 + 1 + 33) * 4
    for proposer, more in (
        (SuffixProposer(3, 4, 2, corpus_size=1000), history + corpus),
        (DraftModelProposer(3, MODEL, "float32", "reference"), history + 33 * 4),
    ):
        monkeypatch.setattr("jaxserve.runner.memory._free_ram", lambda more=more: 10 * PER_BLOCK + state + more)
        check_room(blocks, MODEL, 32, proposer, 512)
        with pytest.raises(ConfigError, match="no room"):
            check_room(blocks, MODEL, 32, proposer, 513)


def test_the_context_is_what_model_and_cache_allow() -> None:
    assert fit_context(KVSize(11, PER_BLOCK, "test"), CacheConfig(), MODEL, None) == 160
    assert fit_context(KVSize(1000, PER_BLOCK, "test"), CacheConfig(), MODEL, None) == 512
    assert fit_context(KVSize(1000, PER_BLOCK, "test"), CacheConfig(), MODEL, 200) == 200


def test_a_context_that_does_not_fit_names_the_one_that_does_and_the_bytes_it_takes() -> None:
    with pytest.raises(ConfigError, match=rf"--max-model-len 160 or less, or give the cache {14 * PER_BLOCK} bytes"):
        fit_context(KVSize(11, PER_BLOCK, "test"), CacheConfig(), MODEL, 200)


def test_a_context_longer_than_the_model_s_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"600 is more than .* 512"):
        fit_context(KVSize(1000, PER_BLOCK, "test"), CacheConfig(), MODEL, 600)
