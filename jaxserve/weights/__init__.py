"""From what a user calls a model to its settings and its parameters on the device."""

from __future__ import annotations

from jaxserve.weights.assemble import Params, Place, load_params
from jaxserve.weights.dummy import init_random
from jaxserve.weights.gguf import GGUFFile
from jaxserve.weights.hub import ModelFiles, resolve
from jaxserve.weights.load import OpenedModel, open_model
from jaxserve.weights.safetensors import SafetensorsReader

__all__ = [
    "GGUFFile",
    "ModelFiles",
    "OpenedModel",
    "Params",
    "Place",
    "SafetensorsReader",
    "init_random",
    "load_params",
    "open_model",
    "resolve",
]
