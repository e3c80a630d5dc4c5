"""A fake engine on a socket for clients that others wrote, with what they expect around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from jaxserve.config import ServerConfig
from tests.server.fake import FakeEngine
from tests.server.serving import served

KEY = "secret"


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Serves an engine that says a text; gives the URL, with ``/v1``."""
    with ExitStack() as stack:

        def serve(says: str | None = None, **settings: Any) -> str:
            config = ServerConfig(port=0, api_key=(KEY,), **settings)
            return stack.enter_context(served(FakeEngine(says=says, max_model_len=4096), config)) + "/v1"

        yield serve


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Nothing of the user's own, and no calls to anywhere else."""
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LLM_LOAD_PLUGINS", "")
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path / "llm"))
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
