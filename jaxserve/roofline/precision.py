"""How values are stored, and so what reading one costs."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["KV_BYTES", "WEIGHT_BITS", "Precision"]

_FLOAT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}

# Quantised weights keep a float16 scale for 32 inputs of a column, 4-bit ones an offset as well (GGUF's Q8_0 and Q4_1).
WEIGHT_BITS = {"float32": 32.0, "bfloat16": 16.0, "float16": 16.0, "int8": 8 + 16 / 32, "int4": 4 + 2 * 16 / 32}

KV_BYTES = {**_FLOAT_BYTES, "int8": 1.0, "float8_e4m3fn": 1.0, "float8_e5m2": 1.0}

_SCALE_BYTES = 4.0  # of a quantised pool: one float32 per slot and KV head, for keys and values each


@dataclass(frozen=True, slots=True)
class Precision:
    """Dtypes of a step.

    Attributes:
        activations: float32, bfloat16 or float16; products are computed in it, whatever the weights are stored in.
        weights: one of WEIGHT_BITS; of the matrices and the table of the logits.
        kv: one of KV_BYTES.

    Raises:
        ValueError: there is no such dtype.
    """

    activations: str = "bfloat16"
    weights: str = "bfloat16"
    kv: str = "bfloat16"

    def __post_init__(self) -> None:
        for what, known in (("activations", _FLOAT_BYTES), ("weights", WEIGHT_BITS), ("kv", KV_BYTES)):
            name = getattr(self, what)
            if name not in known:
                raise ValueError(f"{what} are one of {', '.join(known)}, not {name!r}")

    @property
    def activation_bytes(self) -> float:
        """Bytes of one activation."""
        return _FLOAT_BYTES[self.activations]

    @property
    def weight_value_bytes(self) -> float:
        """Bytes of one value of a matrix, its share of the scales included."""
        return WEIGHT_BITS[self.weights] / 8

    def kv_row_bytes(self, head_dim: int) -> float:
        """Bytes of one token's key (or value) of one head, its scale included."""
        scale = 0.0 if self.kv in _FLOAT_BYTES else _SCALE_BYTES
        return head_dim * KV_BYTES[self.kv] + scale
