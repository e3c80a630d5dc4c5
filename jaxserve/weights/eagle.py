"""EAGLE heads on disk, in the form of the authors (https://github.com/SafeAILab/EAGLE).

A folder or hub model with a ``config.json`` of a model of one layer, and ``pytorch_model.bin`` or safetensors. Heads of
EAGLE and EAGLE-2 hold ``fc.weight`` and ``layers.0.…``, those of EAGLE-3 ``fc.weight``, ``midlayer.…``,
``norm.weight``, ``lm_head.weight`` and ``d2t``: what to add to a token of theirs to have one of the model. A copy of
the model's embedding may lie beside them; the model's own is used. One entry of ``config.json`` is ours:
``eagle_vocabulary``, the tokens that are guessed, where these are not all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from jaxserve.errors import CorruptFileError, LoadError, MissingFileError, ShapeMismatchError
from jaxserve.models.config import ModelConfig
from jaxserve.models.hf_config import from_hf
from jaxserve.weights.drafts import read_vocabulary
from jaxserve.weights.hub import ALIASES, fetch_folder, local_path
from jaxserve.weights.reader import read_json
from jaxserve.weights.safetensors import SafetensorsReader, has_safetensors
from jaxserve.weights.torch_file import TorchFile

__all__ = ["EagleFiles", "is_eagle", "open_eagle", "save_eagle"]

_FILES = ("config.json", "*.safetensors", "*.safetensors.index.json", "pytorch_model.bin")


@dataclass(frozen=True)
class EagleFiles:
    """A head whose settings are known and whose weights can be read.

    Attributes:
        layer: its layer, as a model of one.
        is_fused: whether it reads states from within the model and has an output head of its own (EAGLE-3).
        taps: layers of the model whose inputs it reads, if it says so.
        vocabulary: [W] int32, the token of each logit; None for all tokens in order.
        reader: its tensors.
    """

    layer: ModelConfig
    is_fused: bool
    taps: tuple[int, ...] | None
    vocabulary: NDArray[np.int32] | None
    reader: SafetensorsReader | TorchFile

    @property
    def has_bias(self) -> bool:
        """Whether the product that makes one vector of two has a bias."""
        return "fc.bias" in self.reader.shapes


def is_eagle(model: str, download_dir: str | None = None) -> bool:
    """Whether a folder or hub model holds an EAGLE head: its settings are those of a model of one layer, its weights
    are not."""
    path = local_path(model)
    if model in ALIASES or path.is_file():
        return False
    try:
        config = read_json(fetch_folder(model, ("config.json",), download_dir) / "config.json")
        if config.get("num_hidden_layers") != 1:
            return False
        return "fc.weight" in _reader(fetch_folder(model, _FILES, download_dir)).shapes
    except LoadError:  # whoever opens it as a model says what is wrong with it
        return False


def open_eagle(model: str, download_dir: str | None = None) -> EagleFiles:
    """Find a head and read its settings; raises LoadError with what is wrong."""
    folder = fetch_folder(model, _FILES, download_dir)
    path = folder / "config.json"
    config, reader = read_json(path), _reader(folder)
    names = config.get("architectures")
    if isinstance(names, list):  # LlamaForCausalLMEagle3 and the like
        config["architectures"] = [str(name).replace("Eagle3", "").replace("Eagle", "") for name in names]
    layer = from_hf(config)
    if layer.num_layers != 1 or "fc.weight" not in reader.shapes:
        raise CorruptFileError(f"{folder} holds no EAGLE head: that has one layer, and a tensor fc.weight.")
    is_fused = "midlayer.hidden_norm.weight" in reader.shapes
    vocabulary = _mapped(reader, layer.vocab_size) if is_fused else read_vocabulary(config, "eagle_vocabulary", path)
    return EagleFiles(replace(layer, windows=(None,)), is_fused, _taps(config, path), vocabulary, reader)


def save_eagle(
    folder: Path,
    params: Mapping[str, Any],
    layer: ModelConfig,
    vocabulary: NDArray[np.int32] | None,
    notes: dict[str, Any],
) -> None:
    """Write a head of EAGLE-1: arrays in the form of ``speculative.eagle_specs``, of a llama ``layer`` with plain RoPE;
    ``notes`` are added to the settings."""
    own = params["layer"]
    q, kv = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    matrices = dict(zip(("q_proj", "k_proj", "v_proj"), np.split(own["qkv"], [q, q + kv], axis=1), strict=True))
    gate, up = np.split(own["gate_up"], 2, axis=1)
    tensors = {
        f"layers.0.self_attn.{name}.weight": matrix for name, matrix in (*matrices.items(), ("o_proj", own["o"]))
    }
    tensors |= {f"layers.0.mlp.{name}.weight": matrix for name, matrix in (("gate_proj", gate), ("up_proj", up))}
    tensors |= {"layers.0.mlp.down_proj.weight": own["down"], "fc.weight": params["fc"]}
    tensors = {name: np.ascontiguousarray(np.asarray(matrix, np.float32).T) for name, matrix in tensors.items()}
    tensors["layers.0.post_attention_layernorm.weight"] = np.asarray(own["post_norm"], np.float32)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": layer.vocab_size,
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "max_position_embeddings": layer.max_position,
        "rms_norm_eps": layer.rms_eps,
        "rope_theta": layer.rope_theta,
        "bias": False,
        **notes,
    }
    if vocabulary is not None:
        config["eagle_vocabulary"] = vocabulary.tolist()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config) + "\n", encoding="utf-8")


def _reader(folder: Path) -> SafetensorsReader | TorchFile:
    if has_safetensors(folder):
        return SafetensorsReader(folder)
    if (folder / "pytorch_model.bin").is_file():
        return TorchFile(folder / "pytorch_model.bin")
    raise MissingFileError(f"There is no .safetensors file and no pytorch_model.bin in {folder}.")


def _mapped(reader: SafetensorsReader | TorchFile, vocab_size: int) -> NDArray[np.int32] | None:
    """The token of each logit of an EAGLE-3 head."""
    if "d2t" not in reader.shapes:
        return None
    offsets = reader.integers("d2t")
    tokens = np.arange(offsets.size) + offsets.ravel()
    if not tokens.size or tokens.min() < 0 or tokens.max() >= vocab_size or len(np.unique(tokens)) < tokens.size:
        raise ShapeMismatchError(f"d2t does not lead to distinct tokens of a vocabulary of {vocab_size}.")
    return tokens.astype(np.int32)


def _taps(config: dict[str, Any], path: Path) -> tuple[int, ...] | None:
    """The layers that NVIDIA's heads name; the authors' do not."""
    settings = config.get("eagle_config")
    given = settings.get("eagle_aux_hidden_state_layer_ids") if isinstance(settings, dict) else None
    if given is None:
        return None
    if not (isinstance(given, list) and given and all(type(layer) is int and layer >= 0 for layer in given)):
        raise CorruptFileError(f"{path}: eagle_aux_hidden_state_layer_ids must be a list of layers, got {given!r}.")
    return tuple(given)
