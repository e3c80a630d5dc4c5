"""Scratch memory of a step: a bound from above, not a measurement.

XLA decides what of a step lies in memory at once, so that only a compiled program knows its scratch. The bound counts
what a layer's largest moment can hold, for every array once as the product makes it (float32) and once as it is handed
on, and the parts of attention that is split over long contexts. Tests hold it against what XLA says of compiled
programs: of forward passes for A100, L4 and H200 (docs/kernels.md), which take more than half of it, and on the CPU of
forward passes and of sampling, which takes seven eighths. What speculation's own models take is not counted.

Letters: T tokens and R rows of a step, P places that it samples at, V vocabulary, E embed, F ffw, H heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.models.config import ModelConfig

__all__ = ["Workspace", "workspace_bound"]

_FLOAT = 4  # bytes: products are float32
_CHUNK, _MOST_CHUNKS = 256, 32  # tokens of attention's chunks at least, and chunks of a row at most (DESIGN.md, 12)
_TILE_ROWS, _TILE_QUERIES, _TILE_KEYS = 8, 64, 128  # that the CPU's attention without native kernels takes at once
_LOGITS = 8  # arrays [P, V]: logits, penalised, masked, filtered, their keys, probabilities, noise, sums
_READ = 64  # tokens of a prompt whose log probabilities are read at once (runner.reader)


@dataclass(frozen=True, slots=True)
class Workspace:
    """Bytes at most: of a forward pass, and of sampling, which may overlap."""

    forward: int
    sampling: int

    @property
    def num_bytes(self) -> int:
        """Of both."""
        return self.forward + self.sampling


def workspace_bound(
    model: ModelConfig,
    *,
    max_tokens: int,
    max_rows: int,
    max_places: int,
    max_context: int,
    queries: int = 1,
    on_cpu: bool = False,
    unpacks: bool = False,
) -> Workspace:
    """The bound for the largest step.

    Args:
        model: the model.
        max_tokens, max_rows, max_places: T, R, P.
        max_context: longest context, tokens.
        queries: most tokens of a row that attention treats as a decode.
        on_cpu: attention goes over tiles one by one, and splits no row.
        unpacks: every product writes its whole weight out in floats first, as without a kernel for quantised ones.
    """
    size, ffw, heads = model.hidden_size, model.intermediate_size, model.num_heads
    activations = max_tokens * (6 * ffw + 2 * model.qkv_size + 6 * size)
    if on_cpu:
        keys = 2 * _TILE_ROWS * _TILE_KEYS * model.num_kv_heads * model.head_dim
        attention = keys + max(_TILE_QUERIES, _TILE_ROWS * queries) * heads * (4 * _TILE_KEYS + 3 * model.head_dim)
    else:
        chunks = min(_MOST_CHUNKS, -(-max_context // _CHUNK))
        attention = max_rows * queries * chunks * heads * (model.head_dim + 2)
    sampling = max(max_places, _READ) * model.vocab_size * _LOGITS
    # A weight that is unpacked is there as integers, as floats, times its scales, and in the order of columns.
    weight = 5 * size * max(2 * ffw, model.qkv_size) if unpacks else 0
    table = 2 * size * model.vocab_size if unpacks else 0
    return Workspace((activations + attention + weight) * _FLOAT, (sampling + table) * _FLOAT)
