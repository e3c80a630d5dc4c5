"""What an engine has if it is asked for: guesses ahead, and adapters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from jaxserve.config.flags import flag
from jaxserve.errors import ConfigError

__all__ = ["LoRAConfig", "SpeculativeConfig"]


@dataclass(frozen=True)
class SpeculativeConfig:
    """Which tokens are guessed ahead; off unless a method is given."""

    title: ClassVar[str] = "speculation"
    speculative_model: str | None = flag(
        None,
        "What guesses tokens ahead: [ngram] looks for earlier places in the same text, [suffix] in earlier answers as "
        "well; a smaller model (as MODEL) of the same vocabulary; Medusa heads or an EAGLE head (folder or hub id); or "
        "medusa or eagle for those that train-draft made.",
    )
    num_speculative_tokens: int | None = flag(
        None,
        "Most tokens that are guessed ahead per sequence; 5 by default with [ngram], 8 with [suffix], 4 with a model "
        "or heads, 8 in trees of EAGLE.",
    )
    ngram_prompt_lookup_max: int | None = flag(
        None, "Most tokens that a match of [ngram] or [suffix] compares; 4 by default, 8 with [suffix]."
    )
    ngram_prompt_lookup_min: int | None = flag(None, "Fewest tokens that must match; 2 by default.")
    speculative_eagle_topk: int | None = flag(
        None, "EAGLE: guesses that follow each of the most likely ones; 1, the default, is a chain, more are a tree."
    )
    speculative_num_steps: int | None = flag(None, "EAGLE: guesses on the longest path of a tree; 4 by default.")
    speculative_corpus_size: int | None = flag(
        None, "Tokens of earlier answers that [suffix] remembers; 65,536 by default.", human=True
    )
    speculative_adaptive: bool = flag(
        True, "Verify as many guesses as pay by measurement, maybe none; off verifies all."
    )
    speculative_config: str | None = flag(
        None,
        "The same as a JSON object: method, model, num_speculative_tokens, prompt_lookup_max, prompt_lookup_min, "
        "corpus_size, eagle_topk, num_steps, acceptance_method, posterior_threshold, posterior_alpha.",
    )
    spec_method: str | None = flag(None, "The method by its name: ngram, suffix, draft_model, medusa or eagle.")
    spec_model: str | None = flag(None, "Another name of --speculative-model.")
    spec_tokens: int | None = flag(None, "Another name of --num-speculative-tokens.")
    spec_decoding_acceptance_method: str | None = flag(
        None,
        "Which guesses are kept: rejection_sampler, those that keep the output as it is (the default), or "
        "typical_acceptance_sampler, all that are likely enough: LOSSY, what is sampled no longer follows the model's "
        "distribution and depends on the guesses. At temperature 0 both are exact.",
    )
    typical_acceptance_sampler_posterior_threshold: float | None = flag(
        None, "Typical acceptance keeps a guess of more than this probability; 0.09 by default."
    )
    typical_acceptance_sampler_posterior_alpha: float | None = flag(
        None, "Or of more than this share of exp(-entropy); by default the square root of the threshold."
    )

    @property
    def is_asked(self) -> bool:
        """Whether a method is named."""
        given = (self.speculative_model, self.speculative_config, self.spec_method, self.spec_model)
        return any(value is not None for value in given)

    def __post_init__(self) -> None:
        if isinstance(self.speculative_config, Mapping):  # as Python callers of vLLM pass it
            object.__setattr__(self, "speculative_config", json.dumps(dict(self.speculative_config)))


@dataclass(frozen=True)
class LoRAConfig:
    """Adapters beside the base model; off unless asked for."""

    title: ClassVar[str] = "LoRA adapters"
    enable_lora: bool = flag(False, "Serve adapters beside the base model; a request names one as its model.")
    lora_modules: tuple[str, ...] = flag(
        (),
        "Adapters to load at start: name=path, or a JSON object with name, path and maybe base_model_name. A path is a "
        "PEFT folder or a hub id.",
    )
    max_lora_rank: int = flag(16, "Largest rank of an adapter; slots have room for it, also where a rank is less.")
    max_loras: int = flag(8, "Slots on the device: adapters that one step can use.")
    max_cpu_loras: int | None = flag(
        None, "Most adapters that are kept in host memory, others are read when needed; by default --max-loras."
    )
    lora_dir: str | None = flag(None, "Folder in which an unknown name is looked for as a PEFT folder of that name.")
    lora_dtype: str = flag(
        "auto",
        "Dtype of adapters in memory; auto is that of activations.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    lora_embeddings: bool = flag(
        False, "Room in every slot for adapters that change the embedding or the output head; else these are refused."
    )

    def __post_init__(self) -> None:
        if not isinstance(self.lora_modules, list | tuple):
            raise ConfigError(f"lora_modules must be a list, got {self.lora_modules!r}.", "lora_modules")
        given = (json.dumps(dict(m)) if isinstance(m, Mapping) else m for m in self.lora_modules)
        object.__setattr__(self, "lora_modules", tuple(given))
