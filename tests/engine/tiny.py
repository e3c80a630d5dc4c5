"""A started engine with the tiny model of the equivalence tests and a tokenizer of bytes."""

from __future__ import annotations

from typing import Any

from jaxserve.config import EngineConfig
from jaxserve.engine.startup import Started
from jaxserve.sampling_params import SamplingParams
from tests.equivalence.harness import CONTEXT, MODEL, build
from tests.tokenizer.samples import byte_level_metadata, made_from

__all__ = ["TOKENIZER", "greedy", "start_tiny"]

TOKENIZER, _ = made_from(byte_level_metadata("gpt-2"))


def start_tiny(config: dict[str, Any] | None = None, **shape: Any) -> Started:
    """``config`` has settings of the engine, ``shape`` those of ``build``."""
    return Started(EngineConfig.from_flat(config or {}), build(**shape), TOKENIZER, MODEL, "tiny", CONTEXT, {})


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **more)
