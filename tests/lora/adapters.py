"""A tiny base model and adapters for it, both made and saved by transformers and PEFT."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import PreTrainedModel

from tests.tokenizer.samples import byte_level_metadata
from tests.weights.checkpoints import tiny_model, write_gguf

__all__ = ["ALL", "ATTENTION", "base_model", "edit_config", "make_adapter", "merged_tokens", "write_base"]

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]

_SIZES: dict[str, int] = {"vocab_size": 288, "num_hidden_layers": 2}


@cache
def base_model(tied: bool = True) -> PreTrainedModel:
    """Random, with logits that lie far apart. PEFT changes models in place: take a copy of it."""
    model = tiny_model("llama", tie_word_embeddings=tied, **_SIZES)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(0.4 if parameter.ndim == 2 and "embed" not in name else 1.0)
    return model.eval()


def write_base(path: Path, *, tied: bool = True) -> Path:
    """The base model as a GGUF file, which has its tokenizer in it."""
    write_gguf(path, base_model(tied), "llama", metadata=byte_level_metadata("gpt-2", ["a b"]))
    return path


def _fresh_base(tied: bool) -> PreTrainedModel:
    model = tiny_model("llama", tie_word_embeddings=tied, **_SIZES)
    model.load_state_dict(base_model(tied).state_dict())
    return model.eval()


def make_adapter(
    folder: Path,
    seed: int,
    *,
    targets: Sequence[str] = ALL,
    rank: int = 4,
    size: float = 0.3,
    tied: bool = True,
    **more: Any,
) -> Path:
    """A random adapter, saved by PEFT: as safetensors if the seed is odd, else as a pickle.

    ``size`` is how large its factors' values are; ``more`` goes to LoraConfig.
    """
    config = LoraConfig(r=rank, target_modules=list(targets), task_type="CAUSAL_LM", **{"lora_alpha": 8, **more})
    with _outdated():
        model = get_peft_model(_fresh_base(tied), config)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=size)
    model.save_pretrained(folder, save_embedding_layers=False)
    if seed % 2 == 0:
        saved = folder / "adapter_model.safetensors"
        torch.save(load_file(saved), folder / "adapter_model.bin")
        saved.unlink()
    return folder


@contextmanager
def _outdated() -> Iterator[None]:
    """PEFT calls what transformers is about to remove, and tells what merging would do to tied weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings")
        yield


def edit_config(folder: Path, **changes: Any) -> None:
    """Change fields of an adapter's settings."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def merged_tokens(
    adapter: Path | None, prompts: Sequence[Sequence[int]], count: int, *, tied: bool = True, merged: bool = True
) -> list[list[int]]:
    """What transformers generates greedily, with the adapter merged into the base weights, or beside them."""
    model: Any = base_model(tied)
    if adapter is not None:
        with _outdated():
            model = PeftModel.from_pretrained(_fresh_base(tied), str(adapter)).eval()
            model = model.merge_and_unload() if merged else model
    found = []
    for prompt in prompts:
        tokens = torch.tensor([list(prompt)])
        with torch.no_grad():
            for _ in range(count):
                tokens = torch.cat([tokens, model(tokens).logits[:, -1].argmax(-1, keepdim=True)], 1)
        found.append(tokens[0, len(prompt) :].tolist())
    return found
