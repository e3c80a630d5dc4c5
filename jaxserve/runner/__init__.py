"""The device side: plan -> arrays -> compiled programs -> tokens on their way back."""

from jaxserve.runner.adapters import Adapters
from jaxserve.runner.buckets import Buckets
from jaxserve.runner.compiled import use_compilation_cache
from jaxserve.runner.handle import StepHandle
from jaxserve.runner.memory import check_adapter_room, check_room, fit_blocks, no_room
from jaxserve.runner.runner import Launch, Runner, RunnerShape

__all__ = [
    "Adapters",
    "Buckets",
    "Launch",
    "Runner",
    "RunnerShape",
    "StepHandle",
    "check_adapter_room",
    "check_room",
    "fit_blocks",
    "no_room",
    "use_compilation_cache",
]
