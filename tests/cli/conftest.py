"""The command with a fake engine in the place of the real one."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve.config import EngineConfig
from tests.server.fake import FakeEngine


class Loader:
    """Stands for ``AsyncLLM``: remembers with which configuration it was asked to load."""

    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.config: EngineConfig | None = None
        self.error: Exception | None = None

    def from_config(self, config: EngineConfig, on_progress: Any = None) -> FakeEngine:
        self.config = config
        if self.error is not None:
            raise self.error
        return self.engine


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> Loader:
    loader = Loader()
    monkeypatch.setitem(sys.modules, "jaxserve.engine", SimpleNamespace(AsyncLLM=loader))
    return loader
