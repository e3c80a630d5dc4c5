"""A weight, declared once: shape, logical axes, and where its values come from.

Initialisation, loading and sharding all derive from the tree of ``ParamSpec`` that a model family makes
(``models.registry.param_specs``).
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

__all__ = ["ParamSpec", "Source", "Transform"]


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
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    sources: tuple[Source, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)
