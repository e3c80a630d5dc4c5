"""What all tests share: settings of hypothesis, compiled programs, and who runs what where there are several workers.

Most of a run is spent in XLA's compiler. Programs are kept in pytest's cache folder: workers take them from each other,
subprocesses too, and the next run takes them from this one. Those of tiny models run for milliseconds and are not worth
optimising, which takes as long as all else in their compilation; those of ``real`` are compiled as they are served.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says more about the machine's other work than about the code.
settings.register_profile("jaxserve", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("jaxserve")

LONGEST_FIRST = (
    "real/",
    "kernels/test_cuda_aot.py",
    "test_gpu_tools.py",
    "equivalence/",
    "kernels/",
    "models/test_logits.py",
    "quantization/",
    "engine/",
    "training/",
)
"""What takes minutes should not be begun when the other workers end."""


def pytest_configure(config: pytest.Config) -> None:
    """Before jax and torch are imported, which read these."""
    # Threads of torch wait for each other at every product, which takes milliseconds where others want the cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    cache = getattr(config, "cache", None)  # it is not there with -p no:cacheprovider
    if cache is not None:
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache.mkdir("xla")))
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.05")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before fixtures, which compile as well."""
    import jax

    jax.config.update("jax_disable_most_optimizations", not _file(item.nodeid).startswith("real/"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _rank(_file(item.nodeid)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A worker takes a whole file, as its tests share fixtures and traced functions; ``real`` shares a server."""
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = _file(nodeid)
            return "real" if file.startswith("real/") else file

    return Files(config, log)


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0].removeprefix("tests/")


def _rank(name: str) -> int:
    return next((i for i, start in enumerate(LONGEST_FIRST) if name.startswith(start)), len(LONGEST_FIRST))
