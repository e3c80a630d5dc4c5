"""Prompts from a file of JSON lines: ``{"prompt": …}``, ``{"text": …}`` or ``{"messages": […]}``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.errors import ConfigError, JaxserveError
from jaxserve.tokenizer import Tokenizer

__all__ = ["FEWEST", "read_lines", "tokenise"]

FEWEST = 2
"""One prompt to learn from, and one to measure with."""


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file. ConfigError: it cannot be read, or a line is no prompt."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is no UTF-8 text.") from None
    found = [_object(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if len(found) < FEWEST:
        raise ConfigError(f"{path} must hold at least {FEWEST} prompts, got {len(found)}.")
    return found


def tokenise(objects: list[dict[str, Any]], tokenizer: Tokenizer, most: int, seed: int) -> list[list[int]]:
    """Token ids of prompts, at most ``most`` each, in an order that the seed decides."""
    prompts = []
    for entry in objects:
        if "messages" in entry:
            try:
                ids = tokenizer.apply_chat_template(entry["messages"], add_generation_prompt=True)
            except JaxserveError as error:
                raise ConfigError(f"messages cannot be made a prompt: {error}") from None
        else:
            ids = tokenizer.encode(entry.get("prompt") or entry["text"])
        if ids:
            prompts.append(ids[:most])
    order = np.random.default_rng(seed).permutation(len(prompts))
    return [prompts[i] for i in order]


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is no JSON: {error}.") from None
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where} must be a JSON object, got {type(entry).__name__}.")
    texts = [entry[name] for name in ("prompt", "text") if name in entry]
    messages = entry.get("messages")
    if isinstance(messages, list) and messages:
        return dict(entry)
    if not texts or not isinstance(texts[0], str) or not texts[0]:
        raise ConfigError(f'{where} must have "prompt" or "text" (a text) or "messages" (a list).')
    return dict(entry)
