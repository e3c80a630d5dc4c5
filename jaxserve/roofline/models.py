"""Shapes of well-known models, for questions that need no weights. Numbers are those of each model's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from jaxserve.models.config import ModelConfig

__all__ = ["MODELS"]


def _llama(
    sizes: tuple[int, int, int], heads: tuple[int, int, int], layers: int, context: int, tied: bool
) -> ModelConfig:
    """sizes: V, E, F; heads: H, K, D."""
    return ModelConfig(
        "llama",
        *sizes,
        layers,
        *heads,
        max_position=context,
        rope_theta=500000.0,
        tie_embeddings=tied,
        windows=(None,) * layers,
        rope_layers=(True,) * layers,
        checkpoint_dtype="bfloat16",
    )


MODELS: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "smollm2-135m": _llama((49152, 576, 1536), (9, 3, 64), 30, 8192, tied=True),
        "llama-3.2-1b": _llama((128256, 2048, 8192), (32, 8, 64), 16, 131072, tied=True),
        "llama-3.1-8b": _llama((128256, 4096, 14336), (32, 8, 128), 32, 131072, tied=False),
        "llama-3.1-70b": _llama((128256, 8192, 28672), (64, 8, 128), 80, 131072, tied=False),
    }
)
