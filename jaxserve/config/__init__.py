"""Every default and every flag's help, once: frozen dataclasses, one per concern.

The command line (``cli``), the YAML file and the Python API are derived from these fields. A field's metadata holds its
help text and, where the command line needs it, choices and the form of its value. Names follow vLLM's flags.
"""

from jaxserve.config.features import LoRAConfig, SpeculativeConfig
from jaxserve.config.flags import check_choices
from jaxserve.config.options import (
    CacheConfig,
    EngineConfig,
    ModelOptions,
    RunnerConfig,
    SchedulerConfig,
    ServerConfig,
)

__all__ = [
    "CacheConfig",
    "EngineConfig",
    "LoRAConfig",
    "ModelOptions",
    "RunnerConfig",
    "SchedulerConfig",
    "ServerConfig",
    "SpeculativeConfig",
    "check_choices",
]
