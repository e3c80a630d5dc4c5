"""Bucket -> executable, compiled ahead of time.

A compiled executable called with another shape raises; it never compiles quietly. What compiles after warm-up is
counted by listening to jax itself, so that nothing can escape the count.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import jax

from jaxserve.logging import get_logger

__all__ = ["CompileCounter", "Programs", "use_compilation_cache"]

_log = get_logger(__name__)
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class Programs:
    """Executables by key; one that is asked for before it was compiled is compiled then.

    Args:
        lower: gives the traced and lowered form of the program of a key.
    """

    def __init__(self, lower: Callable[[Any], jax.stages.Lowered]) -> None:
        self.lower = lower
        self._compiled: dict[Hashable, jax.stages.Compiled] = {}

    def __getitem__(self, key: Hashable) -> jax.stages.Compiled:
        if key not in self._compiled:
            self.compile(key, self.lower(key))
        return self._compiled[key]

    def compile(self, key: Hashable, lowered: jax.stages.Lowered) -> None:
        """Compile a program, or read it from the persistent cache; may run in any thread."""
        self._compiled[key] = lowered.compile()


class CompileCounter:
    """Counts the programs that XLA compiles (or reads from its cache) in the steps of one engine.

    Use it as a context around a step: what the thread compiles inside counts, once the counter is armed; what others in
    the process compile does not.

    Attributes:
        count: programs counted so far.
        armed: whether to count; set it after warm-up.
    """

    def __init__(self) -> None:
        self.count = 0
        self.armed = False
        self._thread: int | None = None
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def __enter__(self) -> None:
        self._thread = threading.get_ident()

    def __exit__(self, *exc: object) -> None:
        self._thread = None

    def close(self) -> None:
        """Stop listening."""
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if self.armed and event == _COMPILE_EVENT and threading.get_ident() == self._thread:
            self.count += 1
            _log.warning("a program was compiled while serving (%.2f s); please report this", duration_secs)


def use_compilation_cache(folder: str | None) -> None:
    """Keep compiled programs in ``folder`` (None: ~/.cache/jaxserve/xla; "off": nowhere) across processes."""
    if folder == "off":
        return
    path = Path(folder).expanduser() if folder else Path.home() / ".cache" / "jaxserve" / "xla"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _log.warning("no compilation cache: %s", error)
        return
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
