"""A weight, declared once: shape, logical axes, and where its values come from.

Initialisation, loading and sharding all derive from the tree of ``ParamSpec`` that a model family makes
(``models.registry.param_specs``).
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

__all__ = ["ParamSpec", "Source", "Transform", "Use"]


class Use(enum.Enum):
    """What a parameter is used for."""

    VECTOR = "vector"  # a norm or a bias
    MATRIX = "matrix"  # [I, O], multiplied
    LOOKUP = "lookup"  # a table [V, E] whose rows are looked up, and nothing else
    LOGITS = "logits"  # a table [V, E] that logits are made with; looked up too if it is tied


class Transform(enum.Enum):
    """What turns a checkpoint tensor into (a part of) a parameter."""

    NONE = "none"
    TRANSPOSE = "transpose"  # [out, in] as stored by torch -> [in, out] as multiplied here
    UNPERMUTE_TRANSPOSE = "unpermute_transpose"  # GGUF's interleaved-RoPE row order -> half-split, then transposed
    UNPERMUTE = "unpermute"  # the same for a bias


@dataclass(frozen=True, slots=True)
class Source:
    """One tensor of a checkpoint.

    Attributes:
        name: its name there.
        shape: its shape there.
        transform: applied after reading.
        heads: number of heads along the output axis (only the UNPERMUTE transforms use it).
    """

    name: str
    shape: tuple[int, ...]
    transform: Transform = Transform.NONE
    heads: int = 0


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter of a model.

    Attributes:
        shape: its shape.
        axes: logical name per axis ("vocab", "embed", "heads", "ffw", None), for sharding.
        sources: checkpoint tensors that are concatenated along the last axis (after their transforms) to make it.
        use: what it is used for. It changes none of its values, and is left out of the text that cached values are
            known by.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    sources: tuple[Source, ...]
    use: Use = field(default=Use.VECTOR, repr=False)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_factor(self) -> bool:
        """Whether it is the right factor of a matrix product."""
        return self.use in (Use.MATRIX, Use.LOGITS)

    @property
    def size_in(self) -> int:
        """I of a factor [I, O]: what is summed over."""
        return self.shape[1] if self.use is Use.LOGITS else self.shape[0]
