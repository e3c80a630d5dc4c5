"""Random adapters as PEFT saves them: what measurements use, as dummy weights stand for a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from jaxserve.lora.layout import TARGETS, Layout
from jaxserve.lora.peft import CONFIG
from jaxserve.models.config import ModelConfig
from jaxserve.models.names import HF_NAMES

__all__ = ["write_random_adapter"]


def write_random_adapter(
    folder: Path, model: ModelConfig, rank: int, seed: int, targets: Sequence[str] = TARGETS
) -> str:
    """Make an adapter for ``model`` in a new folder, and return the folder's path.

    Args:
        folder: where it lies.
        model: its base model.
        rank: of all its factors.
        seed: picks their values, which are small: with it the model still writes text.
        targets: projections that it changes, some of ``lora.layout.TARGETS``.
    """
    rng = np.random.default_rng(seed)
    sizes = Layout(model, rank, np.dtype(np.float32), tuple(targets)).projections()
    tensors = {}
    for layer in range(model.num_layers):
        for name in targets:
            size_in, size_out = sizes[name]
            stem = "base_model.model." + HF_NAMES[name].format(i=layer)
            for factor, shape in (("A", (rank, size_in)), ("B", (size_out, rank))):
                values = rng.standard_normal(shape, np.float32) * np.float32(0.01)
                tensors[f"{stem}.lora_{factor}.weight"] = values
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    modules = [HF_NAMES[name].rpartition(".")[2] for name in targets]
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules}
    (folder / CONFIG).write_text(json.dumps(settings), encoding="utf-8")
    return str(folder)
