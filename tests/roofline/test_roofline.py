"""The arithmetic of lower bounds, against values worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.models.registry import param_specs
from jaxserve.models.spec import ParamSpec, Use
from jaxserve.roofline import (
    CHIPS,
    MODELS,
    Chip,
    Precision,
    StepShape,
    Work,
    kernels_bound,
    kv_token_bytes,
    step_bound,
    step_work,
    weight_bytes,
)

BF16 = Precision()
LLAMA_8B = MODELS["llama-3.1-8b"]
SLOW = Chip("one byte and two operations a second", 1.0, 100, {"bfloat16": 2.0})


def named(works: tuple[Work, ...]) -> dict[str, Work]:
    return {work.name: work for work in works}


@pytest.mark.parametrize(
    ("model", "precision", "expected"),
    [
        ("llama-3.1-8b", BF16, 128 * 1024),  # 2 x 32 layers x 8 heads x 128 x 2 bytes
        ("llama-3.1-70b", BF16, 320 * 1024),  # 2 x 80 x 8 x 128 x 2
        ("smollm2-135m", Precision("float32", "float32", "float32"), 45 * 1024),  # 2 x 30 x 3 x 64 x 4
        ("llama-3.1-8b", Precision(kv="int8"), 66 * 1024),  # half of 128 KiB, and 2 x 32 x 8 scales of 4 bytes
    ],
)
def test_kv_of_a_token(model: str, precision: Precision, expected: int) -> None:
    assert kv_token_bytes(MODELS[model], precision) == expected


def test_weights_of_an_8b_model() -> None:
    # Per layer 4096 x (4096 + 2 x 1024) + 4096 x 4096 + 3 x 4096 x 14336 = 218 103 808; two tables of 128256 x 4096.
    parameters = 32 * 218_103_808 + 2 * 525_336_576
    assert parameters == 8_029_995_008
    assert weight_bytes(LLAMA_8B, BF16) == 2 * parameters
    # 4 bits, and 2 x 16 bits for 32 values: 5 bits. The table that is only looked up stays in 16.
    assert (
        weight_bytes(LLAMA_8B, Precision(weights="int4")) == (32 * 218_103_808 + 525_336_576) * 5 / 8 + 2 * 525_336_576
    )


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_that_the_decoder_declares(name: str) -> None:
    specs = jax.tree.leaves(param_specs(MODELS[name], "hf"), is_leaf=lambda leaf: isinstance(leaf, ParamSpec))
    declared = sum(spec.size for spec in specs if spec.use is not Use.VECTOR)
    assert weight_bytes(MODELS[name], BF16) == 2 * declared


def test_a_decode_step_by_hand() -> None:
    works = named(step_work(LLAMA_8B, StepShape(decodes=64, context=1024), BF16))
    attention = works["decode attention"]
    assert attention.count == 32
    assert attention.kv_bytes == 64 * 1024 * 4096  # 268 MB: a token's keys and values take 4 KiB in a layer
    assert attention.activation_bytes == 2 * 64 * 4096 * 2
    assert attention.operations == 4 * 64 * 1024 * 32 * 128
    assert works["qkv product"].weight_bytes == 4096 * 6144 * 2
    assert works["qkv product"].operations == 2 * 64 * 4096 * 6144
    assert works["kv_write"].kv_bytes == 64 * 4096
    assert works["logits product"].activation_bytes == 64 * (4096 * 2 + 128256 * 4)


def test_the_floor_of_a_decode_step_by_hand() -> None:
    step = StepShape(decodes=64, context=1024)
    bound = step_bound(step_work(LLAMA_8B, step, BF16), CHIPS["h200"], "bfloat16")
    # All weights but the table that is looked up: 15.0 GB; KV read 8.59 GB, written 64 x 128 KiB.
    moved = 2 * (8_029_995_008 - 525_336_576) + 64 * 1024 * 131072 + 64 * 131072
    assert bound.seconds == pytest.approx(moved / 4.8e12)
    assert bound.seconds == pytest.approx(4.92e-3, rel=1e-3)
    assert bound.is_memory_bound
    assert bound.generated_per_second(step) == pytest.approx(64 / bound.seconds)
    assert bound.prompt_per_second(step) == 0


def test_a_prompt_chunk_is_bound_by_operations() -> None:
    step = StepShape(decodes=0, context=0, chunk=2048)
    works = step_work(LLAMA_8B, step, BF16)
    bound = step_bound(works, CHIPS["a100"], "bfloat16")
    # 2 operations per weight and token in the layers, causal attention, and the logits of one token.
    products = 2 * 2048 * 32 * 218_103_808 + 2 * 525_336_576
    attention = 32 * 4 * (2048 * 2049 // 2) * 32 * 128
    assert bound.seconds == pytest.approx((products + attention) / 312e12)
    assert not bound.is_memory_bound
    assert bound.prompt_per_second(step) == pytest.approx(2048 / bound.seconds)
    assert named(works)["prefill attention"].kv_bytes == 2048 * 4096


def test_drafts_are_query_tokens_of_the_same_cache() -> None:
    plain = named(step_work(LLAMA_8B, StepShape(decodes=8, context=100), BF16))
    verify = named(step_work(LLAMA_8B, StepShape(decodes=8, context=100, drafts=3), BF16))
    assert verify["decode attention"].kv_bytes == plain["decode attention"].kv_bytes
    assert verify["decode attention"].operations == 4 * 8 * (97 + 98 + 99 + 100) * 32 * 128
    assert verify["qkv product"].weight_bytes == plain["qkv product"].weight_bytes
    assert verify["qkv product"].operations == 4 * plain["qkv product"].operations


def test_layers_with_a_window_read_less() -> None:
    model = replace(LLAMA_8B, windows=(None, 128) * 16)
    works = named(step_work(model, StepShape(decodes=2, context=1000, chunk=256, before=500), BF16))
    assert works["decode attention"].count == works["decode attention, window 128"].count == 16
    assert works["decode attention"].kv_bytes == 2 * 1000 * 4096
    assert works["decode attention, window 128"].kv_bytes == 2 * 128 * 4096
    assert works["prefill attention"].kv_bytes == 756 * 4096
    assert works["prefill attention, window 128"].kv_bytes == (256 + 127) * 4096
    assert works["prefill attention, window 128"].operations == 4 * 256 * 128 * 32 * 128


@given(queries=st.integers(1, 40), before=st.integers(0, 60), window=st.one_of(st.none(), st.integers(1, 70)))
def test_pairs_that_attend_are_counted(queries: int, before: int, window: int | None) -> None:
    model = replace(LLAMA_8B, windows=(window,) * 32)
    work = step_work(model, StepShape(decodes=0, context=0, chunk=queries, before=before), BF16)
    found = next(w for w in work if w.name.startswith("prefill"))
    seen = [
        position + 1 if window is None else min(position + 1, window) for position in range(before, before + queries)
    ]
    assert found.operations == 4 * sum(seen) * 32 * 128


def test_kernels_one_after_the_other_take_longer_than_all_at_once() -> None:
    works = (Work("bytes", 2, weight_bytes=10, operations=2), Work("operations", 1, activation_bytes=3, operations=40))
    together, apart = step_bound(works, SLOW, "bfloat16"), kernels_bound(works, SLOW, "bfloat16")
    assert (together.memory_seconds, together.compute_seconds, together.seconds) == (20, 22, 22)
    assert (apart.memory_seconds, apart.compute_seconds, apart.seconds) == (23, 22, 40)


@pytest.mark.parametrize("chip", CHIPS)
def test_no_step_beats_its_floor(chip: str) -> None:
    for step in (StepShape(), StepShape(decodes=128, context=4096), StepShape(decodes=16, context=64, chunk=512)):
        works = step_work(LLAMA_8B, step, BF16)
        assert (
            step_bound(works, CHIPS[chip], "bfloat16").seconds <= kernels_bound(works, CHIPS[chip], "bfloat16").seconds
        )


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="weights are one of float32"):
        Precision(weights="int3")
    with pytest.raises(ValueError, match="has no speed for float8_e4m3fn"):
        CHIPS["a100"].speed("float8_e4m3fn")
    with pytest.raises(ValueError, match="a step has a decode or a chunk"):
        StepShape(decodes=0)
    with pytest.raises(ValueError, match="includes the step's own tokens"):
        StepShape(decodes=1, context=3, drafts=3)
