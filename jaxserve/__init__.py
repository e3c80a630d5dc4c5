"""jaxserve: an LLM inference and serving engine on JAX.

Public names are imported when first used, so that the command line starts quickly.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.config import EngineConfig
    from jaxserve.engine import LLM, AsyncLLM, LoRARequest
    from jaxserve.errors import JaxserveError
    from jaxserve.outputs import CompletionOutput, RequestOutput
    from jaxserve.sampling_params import SamplingParams, StructuredOutputsParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineConfig",
    "JaxserveError",
    "LoRARequest",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]

_HOMES = {
    "AsyncLLM": "jaxserve.engine",
    "CompletionOutput": "jaxserve.outputs",
    "EngineConfig": "jaxserve.config",
    "JaxserveError": "jaxserve.errors",
    "LLM": "jaxserve.engine",
    "LoRARequest": "jaxserve.engine",
    "RequestOutput": "jaxserve.outputs",
    "SamplingParams": "jaxserve.sampling_params",
    "StructuredOutputsParams": "jaxserve.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxserve' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
