"""The kernels of a step, and the bytes and operations of each.

Bytes are those of weights and of the cache, which have to be moved, and those of activations, which XLA's kernels hand
to each other through memory. Operations are those of matrix products; everything else is bound by bytes on every chip.
Kernels are those of the compiled program (docs/kernels.md), with what XLA fuses into them.

Letters: T tokens, E embed, H/K query/KV heads, D head dim, F ffw, V vocab.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from jaxserve.models.config import ModelConfig
from jaxserve.roofline.memory import layer_matrices
from jaxserve.roofline.precision import Precision

__all__ = ["StepShape", "Work", "step_work"]

_LOGIT_BYTES = 4  # logits are float32


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step does: decodes of equal length, and a chunk of one prompt beside them.

    Attributes:
        decodes: rows that decode.
        context: tokens that each has in the cache, this step's included.
        drafts: tokens that each verifies besides its own.
        chunk: prompt tokens.
        before: tokens of that prompt that are already in the cache.
    """

    decodes: int = 1
    context: int = 1
    drafts: int = 0
    chunk: int = 0
    before: int = 0

    def __post_init__(self) -> None:
        if min(self.decodes, self.drafts, self.chunk, self.before) < 0 or self.tokens < 1:
            raise ValueError("a step has a decode or a chunk, and nothing in it is negative")
        if self.decodes and self.context <= self.drafts:
            raise ValueError("a context includes the step's own tokens")

    @property
    def tokens(self) -> int:
        """T."""
        return self.decodes * (1 + self.drafts) + self.chunk

    @property
    def sampled(self) -> int:
        """Tokens whose logits are needed: those of the decodes, and the chunk's last."""
        return self.decodes * (1 + self.drafts) + (self.chunk > 0)


@dataclass(frozen=True, slots=True)
class Work:
    """One kernel of a step.

    Attributes:
        name: what it is.
        count: how often it runs in the step; the other figures are of one run.
        weight_bytes, kv_bytes, activation_bytes: moved between memory and chip.
        operations: of matrix products.
    """

    name: str
    count: int
    weight_bytes: float = 0.0
    kv_bytes: float = 0.0
    activation_bytes: float = 0.0
    operations: float = 0.0

    @property
    def bytes(self) -> float:
        """All bytes of one run."""
        return self.weight_bytes + self.kv_bytes + self.activation_bytes


def step_work(model: ModelConfig, step: StepShape, precision: Precision) -> tuple[Work, ...]:
    """All kernels of a step, in the order in which a layer runs them."""
    tokens, layers, unit = step.tokens, model.num_layers, precision.activation_bytes
    hidden, ffw = tokens * model.hidden_size * unit, tokens * model.intermediate_size * unit
    heads = tokens * model.num_heads * model.head_dim * unit
    new_kv = 2 * tokens * model.num_kv_heads * model.head_dim * unit
    written = 2 * tokens * model.num_kv_heads * precision.kv_row_bytes(model.head_dim)
    roped = heads + new_kv / 2
    products = {name: _product(name, layers, shape, tokens, precision) for name, shape in layer_matrices(model).items()}
    return (
        Work("embed", 1, activation_bytes=2 * hidden),
        Work("rms_norm", 2 * layers + 1, activation_bytes=2 * hidden),
        products["qkv"],
        Work("rope", sum(model.rope_layers), activation_bytes=2 * roped),
        Work("kv_write", layers, kv_bytes=written, activation_bytes=new_kv),
        *_attention(model, step, precision),
        products["o"],
        products["gate_up"],
        Work("silu_mul", layers, activation_bytes=3 * ffw),
        products["down"],
        _logits(model, step, precision),
        Work("argmax", 1, activation_bytes=step.sampled * model.vocab_size * _LOGIT_BYTES),
    )


def _product(name: str, count: int, shape: tuple[int, int], tokens: int, precision: Precision) -> Work:
    inputs, outputs = shape
    return Work(
        f"{name} product",
        count,
        weight_bytes=inputs * outputs * precision.weight_value_bytes,
        activation_bytes=tokens * (inputs + outputs) * precision.activation_bytes,
        operations=2.0 * tokens * inputs * outputs,
    )


def _logits(model: ModelConfig, step: StepShape, precision: Precision) -> Work:
    size, vocab = model.hidden_size, model.vocab_size
    return Work(
        "logits product",
        1,
        weight_bytes=size * vocab * precision.weight_value_bytes,
        activation_bytes=step.sampled * (size * precision.activation_bytes + vocab * _LOGIT_BYTES),
        operations=2.0 * step.sampled * size * vocab,
    )


def _attention(model: ModelConfig, step: StepShape, precision: Precision) -> list[Work]:
    """The launches for decodes and for the chunk, once per kind of layer (full, and each width of window)."""
    found = []
    for window, count in Counter(model.windows).items():
        parts = (
            ("decode attention", step.decodes, 1 + step.drafts, step.context - 1 - step.drafts),
            ("prefill attention", int(step.chunk > 0), step.chunk, step.before),
        )
        for name, rows, queries, before in parts:
            if rows:
                found.append(
                    _attend(name, count, model, precision, rows=rows, queries=queries, before=before, window=window)
                )
    return found


def _attend(
    name: str,
    count: int,
    model: ModelConfig,
    precision: Precision,
    *,
    rows: int,
    queries: int,
    before: int,
    window: int | None,
) -> Work:
    """Attention of ``rows`` rows of ``queries`` query tokens each, after ``before`` cached ones."""
    read = queries + (before if window is None else min(before, window - 1))
    pairs = _visible(queries, before, window)
    return Work(
        name if window is None else f"{name}, window {window}",
        count,
        kv_bytes=rows * read * 2 * model.num_kv_heads * precision.kv_row_bytes(model.head_dim),
        activation_bytes=2 * rows * queries * model.num_heads * model.head_dim * precision.activation_bytes,
        operations=4.0 * rows * pairs * model.num_heads * model.head_dim,
    )


def _visible(queries: int, before: int, window: int | None) -> int:
    """Pairs of a query token and a token that it sees, itself included."""
    full = queries * before + queries * (queries + 1) // 2
    if window is None:
        return full
    hidden = before + queries - window  # tokens that the last query no longer sees
    if hidden <= 0:
        return full
    first = max(hidden - queries, 0)  # that the query before the first no longer sees
    return full - (hidden * (hidden + 1) - first * (first + 1)) // 2
