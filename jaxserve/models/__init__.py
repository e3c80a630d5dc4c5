"""What a model computes and which weights it needs, as plain values; and the decoder that computes it."""

from __future__ import annotations

from jaxserve.models.config import ModelConfig, RopeScaling
from jaxserve.models.gguf_config import from_gguf
from jaxserve.models.hf_config import from_hf
from jaxserve.models.registry import param_specs
from jaxserve.models.spec import ParamSpec, Source, Transform, Use

__all__ = [
    "ModelConfig",
    "ParamSpec",
    "RopeScaling",
    "Source",
    "Transform",
    "Use",
    "from_gguf",
    "from_hf",
    "param_specs",
]
