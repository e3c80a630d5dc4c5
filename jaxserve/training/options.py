"""What a training can be asked for: the options of ``jaxserve train-draft``, from which its flags are made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from jaxserve.errors import ConfigError
from jaxserve.settings import check_choices

__all__ = ["TrainOptions"]


def _option(default: Any, help: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help, **metadata})


@dataclass(frozen=True)
class TrainOptions:
    """How what guesses is trained."""

    title: ClassVar[str] = "training"
    method: str = _option("medusa", "What is trained.", choices=("medusa", "eagle"))
    output: str | None = _option(
        None, "Folder of the result; by default where --speculative-model medusa looks for it."
    )
    num_heads: int = _option(4, "Medusa: heads, each of which guesses one token further ahead.")
    num_layers: int = _option(1, "Medusa: residual blocks of each head.")
    num_passes: int = _option(3, "EAGLE: guesses in a row that are trained, each from the one before.")
    draft_vocab_size: int = _option(
        8192, "Tokens that may be guessed: the most frequent ones of what the model wrote; 0 is all.", human=True
    )
    max_prompt_tokens: int = _option(64, "Tokens of a prompt, of which the first are kept.", human=True)
    max_tokens: int = _option(128, "Most tokens that the model writes after each prompt.", human=True)
    temperature: float = _option(0.7, "Temperature at which it writes.")
    steps: int = _option(2000, "Steps of training.", human=True)
    batch_size: int = _option(256, "Tokens that a step learns from.", human=True)
    learning_rate: float = _option(1e-3, "Highest learning rate; it rises over the first steps, then falls to 0.")

    def __post_init__(self) -> None:
        check_choices(self)
        for name, low, high in (
            ("num_heads", 1, 16),
            ("num_layers", 0, 4),
            ("num_passes", 1, 8),
            ("draft_vocab_size", 0, 2**20),
            ("max_prompt_tokens", 1, 2**20),
            ("max_tokens", 2, 2**20),
            ("steps", 1, 10**7),
            ("batch_size", 1, 2**16),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(f"{name} must be from {low} to {high}, got {value}.", name)
        if not 0.0 < self.learning_rate <= 1.0:
            raise ConfigError(f"learning_rate must be in (0, 1], got {self.learning_rate}.", "learning_rate")
        if not 0.0 <= self.temperature <= 100.0:
            raise ConfigError(f"temperature must be in [0, 100], got {self.temperature}.", "temperature")
        if self.max_tokens <= self.num_heads:
            raise ConfigError(
                f"max_tokens ({self.max_tokens}) must be more than --num-heads ({self.num_heads}).", "max_tokens"
            )
        if self.output == "":
            raise ConfigError("output must not be empty.", "output")
