"""Loading the native kernels, and doing without."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pallas_kernels import native
from pallas_kernels.native import library
from pallas_kernels.packed_matmul import select_backend as select_matmul
from pallas_kernels.paged_attention import select_backend as select_attention


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A machine without the library; yields where it would be."""
    path = tmp_path / "_native.so"
    monkeypatch.setattr(library, "_find", lambda: path if path.is_file() else None)
    native.missing.cache_clear()
    yield path
    native.missing.cache_clear()


def test_they_are_built_where_there_is_a_compiler() -> None:
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    assert native.missing() is None


def test_an_instruction_set_that_the_cpu_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="does not run kernels for 'vax'"):
        native.use_kernels("vax")
    assert native.use_kernels("generic") == "generic"
    assert native.use_kernels("auto") in ("avx512", "avx2", "neon", "generic")


def test_without_them_xla_takes_over_and_says_why(without_kernels: Path) -> None:
    name, why = select_attention("auto", head_dim=64, dtype="float32")
    assert name == "reference"
    assert "no C++ compiler was found when jaxserve was installed" in why
    reasons = f"not triton: it runs on NVIDIA GPUs only; not cpu: {native.missing()}"
    assert select_matmul("auto") == ("reference", reasons)
    with pytest.raises(ValueError, match="no C\\+\\+ compiler was found"):
        select_attention("cpu", head_dim=64, dtype="float32")


def test_a_library_of_another_platform_is_a_reason_and_no_crash(without_kernels: Path) -> None:
    without_kernels.write_bytes(b"no library")
    reason = native.missing()
    assert reason is not None
    assert f"{without_kernels} cannot be loaded" in reason
