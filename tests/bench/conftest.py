"""A server of a fake engine on a socket with a tokenizer to match, and tiny engines in the place of real ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from jaxserve.blocks import make_blocks
from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.engine.adapters import EngineAdapters, NoAdapters, ServedAdapters
from jaxserve.engine.drafts import open_drafts
from jaxserve.engine.speculation import make_speculation, resolve
from jaxserve.engine.startup import Started
from jaxserve.lora.store import AdapterStore
from jaxserve.runner import Runner
from jaxserve.scheduler import Scheduler
from tests.engine.tiny import start_tiny
from tests.equivalence.adapted import LAYOUT
from tests.equivalence.harness import BACKEND, CONTEXT, MODEL, shared_runner
from tests.server.conftest import serve

__all__ = ["ByteCodec", "codec", "serve", "started"]


class ByteCodec:
    """One token per byte, as the fake engine has it."""

    vocab_size = 256
    special_ids = frozenset(range(128, 256))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], /) -> str:
        return bytes(ids).decode("utf-8", "replace")


@pytest.fixture
def codec(monkeypatch: pytest.MonkeyPatch) -> ByteCodec:
    codec = ByteCodec()
    monkeypatch.setattr("jaxserve.engine.tokenizers.open_tokenizer", lambda name: codec)
    return codec


class FoldedTokenizer:
    """A real tokenizer whose ids are folded into the tiny model's vocabulary."""

    vocab_size = MODEL.vocab_size
    special_ids = frozenset[int]()

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [token % MODEL.vocab_size for token in self._inner.encode(text[:2000], add_special_tokens)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _served(config: EngineConfig, runner: Runner) -> ServedAdapters:
    """Adapters for the tiny model, of the rank that its shared runner has room for."""
    store = AdapterStore(LAYOUT, max_host=config.lora.max_loras)
    return ServedAdapters(store, runner.adapters, config.lora.max_loras)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """Configurations of the engines that were started, which are tiny ones."""
    configs: list[EngineConfig] = []

    def start(config: EngineConfig, on_progress: Any = None) -> Started:
        configs.append(config)
        tiny = start_tiny()
        speculative = resolve(config.speculative, max_tokens=CONTEXT)
        drafts = open_drafts(speculative, config.model, tiny.tokenizer, tiny.model_config)
        proposer = drafts.propose("float32", BACKEND) if speculative else None
        slots = config.lora.max_loras if config.lora.enable_lora else 0
        runner = shared_runner(60, 8, CONTEXT, 4, proposer, num_slots=slots)
        adapters: EngineAdapters = _served(config, runner) if slots else NoAdapters()
        # One runner for all: its pool is larger than what the scheduler is told of.
        scheduler = Scheduler(
            config.scheduler,
            make_blocks(config.cache, config.cache.num_gpu_blocks_override or 60, CONTEXT),
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens or 32,
            max_num_seqs=config.scheduler.max_num_seqs or 4,
            admission=adapters.admission(lambda request_id, why: engine.finish(request_id)),
        )
        scheduler.speculation = make_speculation(speculative, runner.buckets, runner.proposer)
        engine = Engine(scheduler, runner, depth=1)
        tokenizer: Any = FoldedTokenizer(tiny.tokenizer)
        return replace(tiny, config=config, engine=engine, tokenizer=tokenizer, adapters=adapters)

    monkeypatch.setattr("jaxserve.engine.llm.start", start)
    monkeypatch.setattr("jaxserve.engine.async_engine.start", start)
    return configs
