"""What an engine takes where the flags leave it open, by the kind of device."""

from __future__ import annotations

from jaxserve.config import ModelOptions, SchedulerConfig
from jaxserve.errors import ConfigError
from jaxserve.models.config import ModelConfig

__all__ = ["activation_dtype", "step_limits"]

_CPU_LIMITS = (256, 64)  # max_num_batched_tokens, max_num_seqs
_ACCELERATOR_LIMITS = (2048, 256)


def step_limits(config: SchedulerConfig, *, on_cpu: bool) -> tuple[int, int]:
    """Most tokens and rows of a step: as asked, or what suits the device. ConfigError: they contradict each other."""
    tokens, rows = _CPU_LIMITS if on_cpu else _ACCELERATOR_LIMITS
    rows = config.max_num_seqs or rows
    tokens = config.max_num_batched_tokens or max(tokens, rows)
    if tokens < rows:
        raise ConfigError(
            f"--max-num-batched-tokens ({tokens}) must not be less than --max-num-seqs ({rows}): each sequence takes a "
            "token per step."
        )
    return tokens, rows


def activation_dtype(options: ModelOptions, model: ModelConfig, *, on_cpu: bool) -> str:
    """Name of the dtype of activations, of KV, and of weights that are floats."""
    if options.dtype != "auto":
        return options.dtype
    return "float32" if on_cpu else model.checkpoint_dtype
