"""Every default and every flag's help, once: frozen dataclasses, one per concern.

The command line (``cli``), the YAML file and the Python API are derived from these fields. A field's metadata holds its
help text and, where the command line needs it, choices and the form of its value. Names follow vLLM's flags.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

from jaxserve.errors import ConfigError, nearest
from jaxserve.http_config import HttpConfig
from jaxserve.settings import check_choices
from jaxserve.settings import check_integer as _integer
from jaxserve.settings import flag as _flag

__all__ = [
    "CacheConfig",
    "EngineConfig",
    "LoRAConfig",
    "ModelOptions",
    "RunnerConfig",
    "SchedulerConfig",
    "ServerConfig",
    "SpeculativeConfig",
]


@dataclass(frozen=True)
class ModelOptions:
    """Which model, and how it is loaded."""

    title: ClassVar[str] = "model"
    model: str = _flag("smollm2-135m", "Hugging Face folder, GGUF file, hub id, or the alias smollm2-135m.")
    tokenizer: str | None = _flag(None, "Tokenizer folder or hub id; by default that of the model.")
    revision: str | None = _flag(None, "Branch, tag or commit of a hub id.")
    download_dir: str | None = _flag(None, "Folder for hub downloads; by default that of huggingface_hub.")
    dtype: str = _flag(
        "auto",
        "Dtype of weights and activations; auto is float32 on CPU, the checkpoint's own on GPU.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    max_model_len: int | None = _flag(
        None,
        "Most tokens of prompt and output together; by default what the model allows and memory holds.",
        human=True,
    )
    load_format: str = _flag(
        "auto", "Form of the weights; dummy makes random ones.", choices=("auto", "safetensors", "gguf", "dummy")
    )
    quantization: str = _flag(
        "auto",
        "Form of the weights in memory: none is floats, int8 is made on load, gguf keeps the blocks of a quantised "
        "GGUF file; auto keeps them where there are native CPU kernels for them, else it is none.",
        choices=("auto", "none", "int8", "gguf"),
    )
    activation_quantization: str = _flag(
        "none",
        "What quantised weights are multiplied with: activations as they are, or rounded to int8 in groups of 32 while "
        "they are multiplied, as llama.cpp does: faster, and tokens may differ. On the CPU only.",
        choices=("none", "int8"),
    )
    weight_cache_dir: str | None = _flag(
        None,
        "Folder for converted weights; by default ~/.cache/jaxserve/weights, for GGUF files alone; 'off' keeps none.",
    )
    chat_template: str | None = _flag(None, "Jinja file that replaces the model's chat template.")
    seed: int = _flag(0, "Seed of dummy weights, and of requests that give none (with their count).")


@dataclass(frozen=True)
class CacheConfig:
    """How KV memory is laid out and sized."""

    title: ClassVar[str] = "KV cache"
    block_size: int = _flag(16, "Tokens per KV block.", choices=(8, 16, 32, 64, 128))
    gpu_memory_utilization: float = _flag(0.9, "Share of device memory that weights, KV and workspace may fill.")
    kv_cache_memory_bytes: int | None = _flag(None, "Bytes for KV; overrides the share of memory.", human=True)
    num_gpu_blocks_override: int | None = _flag(None, "Number of KV blocks; overrides every other sizing.")
    enable_prefix_caching: bool = _flag(True, "Reuse KV blocks of a common prefix between requests.")
    kv_reservation: str = _flag(
        "paged",
        "How sequences take KV memory: block by block, or, for comparison only, max-model-len tokens each from their "
        "start to their end, as a server with contiguous memory does; then no prefix is shared.",
        choices=("paged", "contiguous"),
    )


@dataclass(frozen=True)
class SchedulerConfig:
    """What may enter one step, and in which order."""

    title: ClassVar[str] = "scheduler"
    max_num_batched_tokens: int | None = _flag(
        None, "Most tokens computed in one step; by default 256 on CPU, 2048 on GPU.", human=True
    )
    max_num_seqs: int | None = _flag(None, "Most sequences in one step; by default 64 on CPU, 256 on GPU.", human=True)
    long_prefill_token_threshold: int = _flag(
        0, "Most prompt tokens of one request per step while others are served; 0 is no such limit.", human=True
    )
    enable_chunked_prefill: bool = _flag(True, "Compute long prompts in chunks beside the decodes of other requests.")
    batching: str = _flag(
        "continuous",
        "When requests may start: at every step, or, for comparison only, when the whole batch before has ended.",
        choices=("continuous", "static"),
    )
    scheduling_policy: str = _flag("fcfs", "Order in which requests are served.", choices=("fcfs", "priority"))
    max_num_queued_reqs: int = _flag(0, "Most waiting requests before new ones get 503; 0 is no limit.", human=True)
    max_num_queued_tokens: int = _flag(0, "Most prompt tokens that may wait before that; 0 is no limit.", human=True)


@dataclass(frozen=True)
class RunnerConfig:
    """How steps are compiled and dispatched."""

    title: ClassVar[str] = "runner"
    async_scheduling: bool = _flag(True, "Dispatch a step before the previous one is read.")
    attention_backend: str = _flag(
        "auto",
        "Attention kernel: Pallas through Triton or Mosaic on NVIDIA GPUs, native C++ on the CPU, or XLA's operations; "
        "auto takes the first of them that serves the model here.",
        choices=("auto", "triton", "cpu", "mosaic", "reference"),
    )
    compilation_cache_dir: str | None = _flag(
        None, "Folder for compiled programs; by default ~/.cache/jaxserve/xla; 'off' keeps none."
    )
    warmup: bool = _flag(True, "Compile every program before serving; without it they compile when first needed.")


@dataclass(frozen=True)
class SpeculativeConfig:
    """Which tokens are guessed ahead; off unless a method is given."""

    title: ClassVar[str] = "speculation"
    speculative_model: str | None = _flag(
        None,
        "What guesses tokens ahead: [ngram] looks for earlier places in the same text, [suffix] in earlier answers as "
        "well; a smaller model (as MODEL) of the same vocabulary; Medusa heads or an EAGLE head (folder or hub id); or "
        "medusa or eagle for those that train-draft made.",
    )
    num_speculative_tokens: int | None = _flag(
        None,
        "Most tokens that are guessed ahead per sequence; 5 by default with [ngram], 8 with [suffix], 4 with a model "
        "or heads, 8 in trees of EAGLE.",
    )
    ngram_prompt_lookup_max: int | None = _flag(
        None, "Most tokens that a match of [ngram] or [suffix] compares; 4 by default, 8 with [suffix]."
    )
    ngram_prompt_lookup_min: int | None = _flag(None, "Fewest tokens that must match; 2 by default.")
    speculative_eagle_topk: int | None = _flag(
        None, "EAGLE: guesses that follow each of the most likely ones; 1, the default, is a chain, more are a tree."
    )
    speculative_num_steps: int | None = _flag(None, "EAGLE: guesses on the longest path of a tree; 4 by default.")
    speculative_corpus_size: int | None = _flag(
        None, "Tokens of earlier answers that [suffix] remembers; 65,536 by default.", human=True
    )
    speculative_adaptive: bool = _flag(
        True, "Verify as many guesses as pay by measurement, maybe none; off verifies all."
    )
    speculative_config: str | None = _flag(
        None,
        "The same as a JSON object: method, model, num_speculative_tokens, prompt_lookup_max, prompt_lookup_min, "
        "corpus_size, eagle_topk, num_steps, acceptance_method, posterior_threshold, posterior_alpha.",
    )
    spec_method: str | None = _flag(None, "The method by its name: ngram, suffix, draft_model, medusa or eagle.")
    spec_model: str | None = _flag(None, "Another name of --speculative-model.")
    spec_tokens: int | None = _flag(None, "Another name of --num-speculative-tokens.")
    spec_decoding_acceptance_method: str | None = _flag(
        None,
        "Which guesses are kept: rejection_sampler, those that keep the output as it is (the default), or "
        "typical_acceptance_sampler, all that are likely enough: LOSSY, what is sampled no longer follows the model's "
        "distribution and depends on the guesses. At temperature 0 both are exact.",
    )
    typical_acceptance_sampler_posterior_threshold: float | None = _flag(
        None, "Typical acceptance keeps a guess of more than this probability; 0.09 by default."
    )
    typical_acceptance_sampler_posterior_alpha: float | None = _flag(
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
    enable_lora: bool = _flag(False, "Serve adapters beside the base model; a request names one as its model.")
    lora_modules: tuple[str, ...] = _flag(
        (),
        "Adapters to load at start: name=path, or a JSON object with name, path and maybe base_model_name. A path is a "
        "PEFT folder or a hub id.",
    )
    max_lora_rank: int = _flag(16, "Largest rank of an adapter; slots have room for it, also where a rank is less.")
    max_loras: int = _flag(8, "Slots on the device: adapters that one step can use.")
    max_cpu_loras: int | None = _flag(
        None, "Most adapters that are kept in host memory, others are read when needed; by default --max-loras."
    )
    lora_dir: str | None = _flag(None, "Folder in which an unknown name is looked for as a PEFT folder of that name.")
    lora_dtype: str = _flag(
        "auto",
        "Dtype of adapters in memory; auto is that of activations.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    lora_target_modules: tuple[str, ...] = _flag(
        (),
        "Projections that adapters may change, as PEFT names them: q_proj v_proj. Slots have room for these only; by "
        "default for all seven.",
    )
    lora_embeddings: bool = _flag(
        False, "Room in every slot for adapters that change the embedding or the output head; else these are refused."
    )

    def __post_init__(self) -> None:
        for name in ("lora_modules", "lora_target_modules"):
            if not isinstance(value := getattr(self, name), list | tuple):
                raise ConfigError(f"{name} must be a list, got {value!r}.", name)
        object.__setattr__(self, "lora_target_modules", tuple(self.lora_target_modules))
        given = (json.dumps(dict(m)) if isinstance(m, Mapping) else m for m in self.lora_modules)
        object.__setattr__(self, "lora_modules", tuple(given))


@dataclass(frozen=True)
class ServerConfig(HttpConfig):
    """The HTTP server: what it serves, and how."""

    title: ClassVar[str] = "server"
    served_model_name: tuple[str, ...] = _flag((), "Names under which the model is served; by default its own.")
    strict_params: bool = _flag(
        False, "Refuse parameters that nobody knows; without it the header x-jaxserve-ignored names them."
    )
    trust_request_chat_template: bool = _flag(
        False, "Let requests bring a chat template of their own, which runs in a sandbox."
    )
    enable_auto_tool_choice: bool = _flag(True, "Let models call tools of their own accord; off refuses such requests.")
    tool_call_parser: str = _flag(
        "auto",
        "Format in which the model writes calls of tools; auto knows it by the chat template.",
        choices=(
            "auto",
            "none",
            "granite",
            "hermes",
            "json",
            "llama3_json",
            "mistral",
            "pythonic",
            "qwen3_coder",
            "qwen3_xml",
        ),
    )
    reasoning_parser: str = _flag(
        "none",
        "How the model marks what it thinks before it answers; none leaves that in the answer.",
        choices=("none", "deepseek_r1", "qwen3", "think"),
    )
    pooling: str = _flag(
        "last",
        "What /v1/embeddings makes of a prompt's hidden states, where a request does not say.",
        choices=("last", "mean"),
    )
    max_stored_responses: int = _flag(
        1000, "Responses of /v1/responses that are kept for retrieval and to go on from; 0 keeps none."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _integer(self, "max_stored_responses", 0)
        if "" in self.served_model_name:
            raise ConfigError("served_model_name must not hold an empty string.", "served_model_name")


@dataclass(frozen=True)
class EngineConfig:
    """Everything that an engine is made from."""

    model: ModelOptions = field(default_factory=ModelOptions)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    runner: RunnerConfig = field(default_factory=RunnerConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)

    @classmethod
    def from_flat(cls, values: Mapping[str, Any]) -> Self:
        """Make a configuration from flat names (``block_size=32``); an unknown name raises ConfigError."""
        left = dict(values)
        parts: dict[str, Any] = {}
        for part in fields(cls):
            kind: Any = part.default_factory
            own = {f.name: left.pop(f.name) for f in fields(kind) if f.name in left}
            parts[part.name] = kind(**own)
        if left:
            raise ConfigError(f"unknown setting {sorted(left)[0]!r}.{nearest(sorted(left)[0], cls.flat_names())}")
        return cls(**parts)

    @classmethod
    def flat_names(cls) -> list[str]:
        """Names of all settings."""
        return [f.name for part in fields(cls) for f in fields(part.default_factory)]  # type: ignore[arg-type]

    def flat(self) -> dict[str, Any]:
        """All settings by name: what ``from_flat`` takes."""
        return {f.name: getattr(part, f.name) for part in self._parts() for f in fields(part)}

    def _parts(self) -> tuple[Any, ...]:
        return self.model, self.cache, self.scheduler, self.runner, self.speculative, self.lora

    def __post_init__(self) -> None:
        for part in self._parts():
            check_choices(part)
            _check_texts(part)
        _integer(self.cache, "kv_cache_memory_bytes", 1)
        _integer(self.cache, "num_gpu_blocks_override", 2, 2**31 - 1)
        _integer(self.scheduler, "max_num_batched_tokens", 1, 2**20)
        _integer(self.scheduler, "max_num_seqs", 1, 2**16)
        for name in ("long_prefill_token_threshold", "max_num_queued_reqs", "max_num_queued_tokens"):
            _integer(self.scheduler, name, 0)
        _integer(self.lora, "max_lora_rank", 1, 512)
        _integer(self.lora, "max_loras", 1, 1024)
        _integer(self.lora, "max_cpu_loras", 1)
        _integer(self.model, "max_model_len", 1)
        _integer(self.model, "seed", -(2**63), 2**64 - 1)
        if not isinstance(self.model.model, str) or not self.model.model:
            raise ConfigError(f"model must be a path, a hub id or an alias, got {self.model.model!r}.")
        if not 0.0 < self.cache.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                f"gpu_memory_utilization must be in (0, 1], got {self.cache.gpu_memory_utilization}.",
                "gpu_memory_utilization",
            )


def _check_texts(part: Any) -> None:
    """An empty text is never a value: as a path it would be the working folder."""
    for f in fields(part):
        if f.name != "model" and getattr(part, f.name) == "":
            raise ConfigError(f"{f.name} must not be empty.", f.name)
