"""Bytes that a model and its cache take."""

from __future__ import annotations

from jaxserve.models.config import ModelConfig
from jaxserve.roofline.precision import Precision

__all__ = ["kv_token_bytes", "layer_matrices", "weight_bytes"]


def layer_matrices(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Name -> (inputs, outputs) of the matrices of a layer, as they are multiplied."""
    size, ffw = model.hidden_size, model.intermediate_size
    return {
        "qkv": (size, model.qkv_size),
        "o": (model.num_heads * model.head_dim, size),
        "gate_up": (size, 2 * ffw),
        "down": (ffw, size),
    }


def weight_bytes(model: ModelConfig, precision: Precision) -> float:
    """Bytes of all weights. Norms and biases, a thousandth of them, are left out."""
    matrices = sum(inputs * outputs for inputs, outputs in layer_matrices(model).values())
    table = model.vocab_size * model.hidden_size
    lookup = 0.0 if model.tie_embeddings else table * precision.activation_bytes
    return (model.num_layers * matrices + table) * precision.weight_value_bytes + lookup


def kv_token_bytes(model: ModelConfig, precision: Precision) -> float:
    """Bytes of one token's keys and values in all layers."""
    return 2 * model.num_layers * model.num_kv_heads * precision.kv_row_bytes(model.head_dim)
