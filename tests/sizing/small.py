"""A model whose KV is counted by hand."""

from __future__ import annotations

from jaxserve.models import ModelConfig

__all__ = ["MODEL", "PER_BLOCK"]

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
PER_BLOCK = 2 * 3 * 16 * 2 * 16 * 4
"""Bytes of a block of 16 tokens in float32."""
