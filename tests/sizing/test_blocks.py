"""How long a context the blocks allow, and sessions in them, by hand."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from jaxserve.config import CacheConfig, EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.roofline import MODELS
from jaxserve.sizing import (
    KVSize,
    block_bytes,
    check_chunking,
    fit_context,
    gpu_memory,
    mix_of,
    most_useful_blocks,
    step_limits,
    workspace_bound,
)
from tests.sizing.small import MODEL, PER_BLOCK


def test_a_block_holds_keys_and_values_of_all_layers() -> None:
    assert block_bytes([MODEL], 16, 4) == PER_BLOCK
    assert block_bytes([MODEL], 16, 2) == PER_BLOCK // 2
    llama_70b = dataclasses.replace(MODEL, num_layers=80, num_kv_heads=8, head_dim=128)
    assert block_bytes([llama_70b], 1, 2) == 320 * 1024
    assert block_bytes([MODEL, dataclasses.replace(MODEL, num_layers=1)], 16, 4, state_size=10) == (
        PER_BLOCK * 4 // 3 + 16 * 10 * 4
    )


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


def test_no_more_blocks_are_useful_than_rows_can_fill() -> None:
    assert most_useful_blocks(MODEL, None, 4, 16) == 4 * 32 + 1
    assert most_useful_blocks(MODEL, 17, 4, 16) == 4 * 2 + 1


def test_limits_of_a_step_are_those_of_the_device_unless_asked() -> None:
    assert step_limits(EngineConfig().scheduler, on_cpu=True) == (256, 64)
    assert step_limits(EngineConfig().scheduler, on_cpu=False) == (2048, 256)
    asked = EngineConfig.from_flat({"max_num_seqs": 300, "enable_chunked_prefill": False}).scheduler
    assert step_limits(asked, on_cpu=True) == (300, 300)
    check_chunking(asked, 300, 300)
    with pytest.raises(ConfigError, match="contexts reach 301 tokens"):
        check_chunking(asked, 300, 301)


@pytest.mark.parametrize(
    ("environment", "limit"),
    [({}, 750), ({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".9"}, 900), ({"XLA_CLIENT_MEM_FRACTION": "0.5"}, 500)],
)
def test_jax_has_a_share_of_a_gpu(environment: dict[str, str], limit: int) -> None:
    assert gpu_memory(1000, environment).limit == limit
    assert gpu_memory(1000, environment).room(100, 0.5) == (limit // 2 - 100, "--gpu-memory-utilization 0.5")


@pytest.mark.parametrize("text", ["0", "1.5", "half", "nan"])
def test_a_share_that_cannot_be_is_refused_by_its_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"XLA_PYTHON_CLIENT_MEM_FRACTION must be a number above 0, at most 1"):
        gpu_memory(1000, {"XLA_PYTHON_CLIENT_MEM_FRACTION": text})


def test_blocks_waste_the_end_of_a_session_and_regions_all_beyond_it() -> None:
    # 100 blocks of 16 for sessions of 20 and 100 tokens: 2 and 7 blocks; regions of 512 tokens are 32 blocks.
    mix = mix_of([20, 100], num_blocks=101, block_size=16, max_context=512, token_bytes=10)
    assert (mix.mean, mix.kv_bytes) == (60, 600)
    assert (mix.paged.tokens, mix.paged.sessions) == (72, 22)
    assert mix.paged.wasted == pytest.approx(12 / 72)
    assert (mix.contiguous.tokens, mix.contiguous.sessions) == (512, 3)
    assert mix.contiguous.wasted == pytest.approx(1 - 60 / 512)


DOCS = Path(__file__).parents[2] / "docs" / "kernels.md"
STEPS = re.findall(
    r"^\| step/([\w.-]+)/(decode|mixed) \| \w+ \|(?: [^|]+ \|){3} ([\d.]+) \|", DOCS.read_text(), re.MULTILINE
)


def test_scratch_of_steps_compiled_for_gpus_is_less_than_the_bound() -> None:
    """Of 64 rows of 8192 tokens, and 512 tokens with prompts (tools/cuda_aot/step_cases.py)."""
    assert len(STEPS) >= 8
    for model, kind, mib in STEPS:
        tokens = 512 if kind == "mixed" else 64
        bound = workspace_bound(MODELS[model], max_tokens=tokens, max_rows=64, max_places=64, max_context=8192)
        assert 0.5 < float(mib) * 2**20 / bound.forward < 1, (model, kind, mib)
