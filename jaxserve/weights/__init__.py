"""From what a user calls a model to its settings and its parameters on the device."""

from __future__ import annotations

from jaxserve.weights.assemble import Params, Place, load_params, place_default
from jaxserve.weights.drafts import default_drafts
from jaxserve.weights.dummy import init_random
from jaxserve.weights.eagle import EagleFiles, is_eagle, open_eagle, save_eagle
from jaxserve.weights.gguf import GGUFFile
from jaxserve.weights.hub import ALIASES, ModelFiles, resolve
from jaxserve.weights.load import OpenedModel, open_model
from jaxserve.weights.medusa import MedusaHeads, is_medusa, open_medusa, save_medusa
from jaxserve.weights.safetensors import SafetensorsReader
from jaxserve.weights.settings import ModelSettings, kept_kinds, open_settings

__all__ = [
    "ALIASES",
    "EagleFiles",
    "GGUFFile",
    "MedusaHeads",
    "ModelFiles",
    "ModelSettings",
    "OpenedModel",
    "Params",
    "Place",
    "SafetensorsReader",
    "default_drafts",
    "init_random",
    "is_eagle",
    "is_medusa",
    "kept_kinds",
    "load_params",
    "open_eagle",
    "open_medusa",
    "open_model",
    "open_settings",
    "place_default",
    "resolve",
    "save_eagle",
    "save_medusa",
]
