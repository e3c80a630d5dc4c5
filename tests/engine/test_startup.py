"""What goes wrong while an engine starts ends the start at once, with one line."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import pytest

from jaxserve.config import EngineConfig, ModelOptions
from jaxserve.engine import loading, startup
from jaxserve.engine.drafts import OpenedDrafts
from jaxserve.engine.speculation import resolve
from jaxserve.errors import ConfigError, ShapeMismatchError
from jaxserve.quantization import WeightForm
from jaxserve.runner import Runner
from jaxserve.speculative import NoProposer
from jaxserve.tokenizer import Tokenizer
from jaxserve.weights import OpenedModel
from pallas_kernels import tuning
from tests.equivalence.harness import MODEL

NOTHING = OpenedDrafts(None, None, lambda dtype: None, lambda dtype, backend: NoProposer())
"""What guesses where nothing does."""


def test_an_interrupt_while_compiling_drops_what_is_left() -> None:
    compiled: list[int] = []
    begun = threading.Event()

    class Programs:
        def lower(self, key: int) -> Any:
            if key == 50:
                begun.wait()
                raise KeyboardInterrupt
            return key

        def compile(self, key: int, lowered: Any) -> None:
            compiled.append(key)
            begun.set()
            threading.Event().wait(0.05)

    runner = SimpleNamespace(programs=lambda: [(Programs(), key) for key in range(100)])
    with pytest.raises(KeyboardInterrupt):
        startup._warm_up(cast("Runner", runner), lambda what, share: None)
    assert 0 < len(compiled) < 50


def failing(message: str) -> Callable[..., Any]:
    def fail(*args: Any) -> Any:
        raise jax.errors.JaxRuntimeError(message)

    return fail


def test_too_large_a_cache_is_told_with_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig.from_flat({"num_gpu_blocks_override": 1000, "max_model_len": 16})
    opened = cast("OpenedModel", SimpleNamespace(config=MODEL))
    device = startup._Device(jnp.dtype("float32"), "reference", (64, 8), NOTHING)

    def make() -> Any:
        return startup._make_runner(config, opened, ({}, None), device)

    monkeypatch.setattr(startup, "Runner", failing("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes."))
    with pytest.raises(ConfigError, match=r"no room for 1000 KV blocks .*--num-gpu-blocks-override"):
        make()
    monkeypatch.setattr(startup, "Runner", failing("INTERNAL: something else"))
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        make()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"max_num_seqs": 8, "max_num_batched_tokens": 4}, "--max-num-batched-tokens"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 64, "max_model_len": 100}, "chunked prefill"),
        ({"attention_backend": "flash"}, "attention_backend"),
    ],
)
def test_settings_that_contradict_each_other_are_told_before_a_model_is_opened(
    settings: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "open_model", lambda options: pytest.fail("the model was opened"))
    with pytest.raises(ConfigError, match=named):
        startup.start(EngineConfig.from_flat(settings))


@pytest.mark.parametrize(
    ("asked", "native", "kept", "form"),
    [
        ("auto", "cpu", ("Q4_1",), WeightForm("gguf", True, "cpu")),
        ("auto", "cpu", (), WeightForm("none", True, "cpu")),
        ("none", "cpu", ("Q4_1",), WeightForm("none", True, "cpu")),
        ("int8", "cpu", ("Q4_1",), WeightForm("int8", True, "cpu")),
        ("auto", None, ("Q4_1",), WeightForm("none", False, "reference")),
        ("gguf", None, ("Q4_1",), WeightForm("gguf", False, "reference")),
        ("int8", None, (), WeightForm("int8", False, "reference")),
        ("auto", "triton", ("Q4_1",), WeightForm("none", False, "triton")),
        ("gguf", "triton", ("Q4_1",), WeightForm("gguf", False, "triton")),
    ],
)
def test_weights_are_packed_for_native_kernels_and_kept_where_they_come_quantised(
    asked: str,
    native: str | None,
    kept: tuple[str, ...],
    form: WeightForm,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(loading, "select_backend", lambda *_, **__: (native or "reference", "for a reason"))
    opened = cast("OpenedModel", SimpleNamespace(name="m", kept_kinds=kept, has_random_weights=False))
    assert loading._weight_form(ModelOptions(quantization=asked), opened) == form
    assert ("which is slow" in caplog.text) == (native is None and form.is_quantised)


def test_activations_are_not_rounded_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    opened = cast("OpenedModel", SimpleNamespace(name="m", kept_kinds=("Q4_1",), has_random_weights=False))
    options = ModelOptions(quantization="gguf", activation_quantization="int8")
    with pytest.raises(ConfigError, match=r"--activation-quantization int8 is made for the CPU.* the device is gpu"):
        loading._weight_form(options, opened)


def test_the_attention_backend_is_logged_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def select(name: str) -> str:
        return startup._select_backend(
            EngineConfig.from_flat({"attention_backend": name}), MODEL, jnp.dtype("bfloat16"), NOTHING
        )

    with caplog.at_level("INFO", "jaxserve"):
        assert select("reference") == "reference"
        with pytest.raises(ConfigError, match="'triton' cannot be used: it runs on NVIDIA GPUs only"):
            select("triton")
        monkeypatch.setattr(tuning, "target", lambda: tuning.Target("NVIDIA H200", 90))
        monkeypatch.setattr("jax.default_backend", lambda: "gpu")
        assert select("auto") == "triton"
    lines = [record.message for record in caplog.records if record.message.startswith("attention backend")]
    assert lines == ["attention backend: reference (asked for)", "attention backend: triton (the fastest for gpu)"]


def test_a_tokenizer_larger_than_the_embedding_is_refused_with_both_sizes() -> None:
    tokenizer = cast("Tokenizer", SimpleNamespace(vocab_size=MODEL.vocab_size + 1))
    with pytest.raises(ShapeMismatchError, match=rf"{MODEL.vocab_size + 1} tokens .* only {MODEL.vocab_size}"):
        startup._check_vocabulary(tokenizer, MODEL)


def test_trees_deeper_than_a_window_are_refused() -> None:
    """MODEL has a window of 24."""
    settings = resolve(EngineConfig.from_flat({"spec_method": "medusa", "spec_tokens": 60}).speculative, max_tokens=64)
    for depth, fits in ((23, True), (24, False)):
        drafts = OpenedDrafts(
            settings, None, lambda dtype, params: None, lambda dtype, backend: NoProposer(), max_depth=depth
        )
        config = EngineConfig.from_flat({"attention_backend": "reference"})
        if fits:
            assert startup._select_backend(config, MODEL, jnp.dtype("float32"), drafts) == "reference"
            continue
        with pytest.raises(ConfigError, match=r"up to 24 drafts deep, but the model has a window of 24 tokens"):
            startup._select_backend(config, MODEL, jnp.dtype("float32"), drafts)
