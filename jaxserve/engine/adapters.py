"""Adapters as an engine has them: those it knows by name, their slots, and the bank on the device, from its flags."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike

from jaxserve.config import EngineConfig, LoRAConfig
from jaxserve.errors import ConfigError, LoadError, ModelNotFoundError, RequestError
from jaxserve.logging import get_logger
from jaxserve.lora.layout import TARGETS, Layout
from jaxserve.lora.store import AdapterStore
from jaxserve.models.config import ModelConfig
from jaxserve.models.names import HF_NAMES
from jaxserve.outputs import AdapterInfo, AdapterStats
from jaxserve.runner import Adapters, check_adapter_room
from jaxserve.scheduler import AdapterSlots, AdmissionRule

__all__ = ["EngineAdapters", "NoAdapters", "ServedAdapters", "adapter_layout", "open_adapters"]

_log = get_logger(__name__)


class EngineAdapters(Protocol):
    """What the engine and its users ask of adapters; but for ``admission``, from any thread.

    Attributes:
        device: the bank.
        num_slots: how many adapters it holds.
        num_bytes: of the bank.
    """

    device: Adapters
    num_slots: int
    num_bytes: int

    def admission(self, refuse: Callable[[str, str], None]) -> Sequence[AdmissionRule]:
        """Rules for requests; ``refuse`` ends one whose adapter cannot be read any more, and says why."""
        ...

    def has(self, name: str) -> bool:
        """Whether a request may ask for an adapter of this name."""
        ...

    def infos(self) -> list[AdapterInfo]:
        """All that are loaded."""
        ...

    def stats(self) -> AdapterStats | None:
        """How they share their slots; None if there are none."""
        ...

    def load(self, name: str, path: str, *, base_model: str | None = None, replace: bool = False) -> AdapterInfo:
        """See ``AdapterStore.load``."""
        ...

    def unload(self, name: str, *, wait: float | None = None) -> None:
        """See ``AdapterStore.unload``."""
        ...

    def prepare(self, name: str) -> None:
        """See ``AdapterStore.prepare``."""
        ...

    @contextmanager
    def lease(self, name: str) -> Iterator[bytes]:
        """See ``AdapterStore.lease``."""
        ...

    def close(self) -> None:
        """Stop reading files."""
        ...


class NoAdapters:
    """Adapters switched off: there are none, and none can be loaded."""

    num_slots = 0
    num_bytes = 0

    def __init__(self) -> None:
        self.device = Adapters()

    def admission(self, refuse: Callable[[str, str], None]) -> Sequence[AdmissionRule]:
        """None."""
        return ()

    def has(self, name: str) -> bool:
        """Never."""
        return False

    def infos(self) -> list[AdapterInfo]:
        """None."""
        return []

    def stats(self) -> None:
        """None."""

    def load(self, name: str, path: str, *, base_model: str | None = None, replace: bool = False) -> AdapterInfo:
        """RequestError: adapters are off."""
        raise RequestError("adapters are off here; start with --enable-lora (enable_lora=True).", "lora_name")

    def unload(self, name: str, *, wait: float | None = None) -> None:
        """RequestError: adapters are off."""
        self.load(name, "")

    def prepare(self, name: str) -> None:
        """There is nothing to load."""

    @contextmanager
    def lease(self, name: str) -> Iterator[bytes]:
        """ModelNotFoundError: there is no adapter."""
        raise ModelNotFoundError(f"there is no adapter {name!r}: adapters are off here.", "model")
        yield b""

    def close(self) -> None:
        """Nothing was begun."""


class ServedAdapters:
    """Adapters by name, with their slots. See ``EngineAdapters``."""

    def __init__(self, store: AdapterStore, device: Adapters, num_slots: int) -> None:
        self.device = device
        self.num_slots = num_slots
        self.num_bytes = device.num_bytes
        self.has, self.load, self.unload = store.has, store.load, store.unload
        self.prepare, self.lease, self.close = store.prepare, store.lease, store.close
        self._store = store
        self._slots: AdapterSlots | None = None

    def admission(self, refuse: Callable[[str, str], None]) -> Sequence[AdmissionRule]:
        """The rule that gives slots to requests; asked for once."""

        def end(request_id: str, reason: str) -> None:
            _log.error("request %s cannot be served: %s", request_id, reason)
            refuse(request_id, reason)

        self._slots = AdapterSlots(self.num_slots, self._store, place=self.device.place, refuse=end)
        return (self._slots,)

    def infos(self) -> list[AdapterInfo]:
        """All that are loaded, in order of loading."""
        resident = {} if self._slots is None else self._slots.resident
        return [replace(info, slot=resident.get(bytes.fromhex(info.key))) for info in self._store.infos()]

    def stats(self) -> AdapterStats | None:
        """How they share their slots. Of an adapter that was replaced, only the newest version is told."""
        if (slots := self._slots) is None:
            return None
        held = {key.hex() for key in slots.held}
        used = [info for info in self._store.infos() if info.num_requests]
        running = tuple(info.name for info in used if info.key in held)
        waiting = tuple(info.name for info in used if info.key not in held)
        return AdapterStats(self.num_slots, running, waiting, slots.evictions_total, slots.load_seconds)


def open_adapters(config: EngineConfig, model: ModelConfig, dtype: DTypeLike) -> EngineAdapters:
    """What the flags ask for: an empty bank, and the adapters of ``--lora-modules`` in host memory.

    Args:
        config: of these, the flags of adapters are read, and where downloads lie.
        model: the base model.
        dtype: of its activations.

    Raises:
        ConfigError: an adapter cannot be loaded, the bank does not fit, or flags are without effect.
    """
    lora = config.lora
    modules = [_module(text) for text in lora.lora_modules]
    layout = adapter_layout(lora, model, dtype)
    if layout is None:
        return NoAdapters()
    if lora.lora_dir is not None and not Path(lora.lora_dir).expanduser().is_dir():
        raise ConfigError(f"lora_dir must be a folder, got {lora.lora_dir!r}.", "lora_dir")
    check_adapter_room(layout, lora.max_loras)
    store = _store(lora, layout, config.model.download_dir)
    for name, path, base_model in modules:
        try:
            store.load(name, path, base_model=base_model)
        except (LoadError, RequestError) as error:
            raise ConfigError(f"--lora-modules {name}: {error}") from error
    return ServedAdapters(store, Adapters(layout, lora.max_loras), lora.max_loras)


def adapter_layout(lora: LoRAConfig, model: ModelConfig, dtype: DTypeLike) -> Layout | None:
    """Where factors lie, None if adapters are off; ``dtype`` is that of activations. ConfigError: flags are without
    effect, or name no projection."""
    if not lora.enable_lora:
        for flag in fields(lora):
            if getattr(lora, flag.name) != flag.default:
                raise ConfigError(f"{flag.name} has no effect without --enable-lora.", flag.name)
        return None
    return Layout(
        model,
        lora.max_lora_rank,
        np.dtype(dtype if lora.lora_dtype == "auto" else lora.lora_dtype),
        _targets(lora.lora_target_modules),
        lora.lora_embeddings,
    )


def _store(lora: LoRAConfig, layout: Layout, download_dir: str | None) -> AdapterStore:
    folder = None if lora.lora_dir is None else Path(lora.lora_dir).expanduser()
    return AdapterStore(layout, max_host=lora.max_cpu_loras or lora.max_loras, folder=folder, download_dir=download_dir)


def _targets(names: Sequence[str]) -> tuple[str, ...]:
    """The projections that PEFT calls so; all if none is named."""
    known = {HF_NAMES[name].rpartition(".")[2]: name for name in TARGETS}
    for name in names:
        if name not in known:
            raise ConfigError(
                f"lora_target_modules must be some of {', '.join(known)}, got {name!r}.", "lora_target_modules"
            )
    return tuple(target for name, target in known.items() if not names or name in names)


def _module(text: Any) -> tuple[str, str, str | None]:
    """Name, path and base model of an entry of --lora-modules."""
    wrong = ConfigError(
        f"lora_modules must hold name=path, or JSON objects with name, path and maybe base_model_name, got {text!r}.",
        "lora_modules",
    )
    if not isinstance(text, str):
        raise wrong
    if not text.lstrip().startswith("{"):
        name, _, path = text.partition("=")
        if not name or not path:
            raise wrong
        return name, path, None
    try:
        entry = json.loads(text)
    except ValueError:
        raise wrong from None
    known = {"name", "path", "base_model_name"}
    if not isinstance(entry, Mapping) or not {"name", "path"} <= entry.keys() <= known:
        raise wrong
    if not all(isinstance(value, str) and value for value in entry.values()):
        raise wrong
    return entry["name"], entry["path"], entry.get("base_model_name")
