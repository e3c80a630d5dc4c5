"""A jax that has removed Pallas' Triton lowering: the package is whole, and chooses other backends with its reason."""

from __future__ import annotations

import json
import subprocess
import sys

import jax
import pytest

_SCRIPT = """
import importlib, json, pkgutil, sys
sys.modules["jax.experimental.pallas.triton"] = None
import jax, numpy as np
import pallas_kernels
for module in pkgutil.walk_packages(pallas_kernels.__path__, "pallas_kernels."):
    if not module.name.rpartition(".")[2].startswith(("_", "mosaic_")):  # no extension, and nothing that is lazy itself
        importlib.import_module(module.name)
from pallas_kernels import lora_matmul, packed_matmul, paged_attention, tuning
from tests.kernels.cases import AttentionCase, attend

case = AttentionCase(((1, 9), (20, 41)))
chosen = paged_attention.select_backend("auto", head_dim=case.head_dim, dtype=case.dtype)[0]
errors = {}
for backend in {"reference", chosen}:
    serve = getattr(importlib.import_module(f"pallas_kernels.paged_attention.{backend}"), "paged_attention")
    errors[backend] = float(np.abs(attend(case, serve) - case.expected()).max())

jax.default_backend = lambda: "gpu"
tuning.target = lambda: tuning.Target("NVIDIA H200", 90)
attention = {"head_dim": 128, "dtype": "bfloat16"}
found = {
    "attention": paged_attention.select_backend("auto", **attention),
    "attention of heads of 96": paged_attention.select_backend("auto", head_dim=96, dtype="bfloat16"),
    "products": packed_matmul.select_backend("auto"),
    "adapters": lora_matmul.select_backend("auto"),
}
try:
    paged_attention.select_backend("triton", **attention)
except ValueError as error:
    found["refusal"] = str(error)
print(json.dumps({"errors": errors, **found}))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, object]:
    """What a process without it has found."""
    ran = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def test_other_backends_serve(found: dict[str, dict[str, float]]) -> None:
    assert "reference" in found["errors"]
    assert max(found["errors"].values()) < 2e-5


def test_mosaic_takes_its_place_on_hopper(found: dict[str, tuple[str, str]]) -> None:
    name, why = found["attention"]
    assert name == "mosaic"
    assert f"not triton: Triton's lowering of jax {jax.__version__} cannot be imported: " in why
    for operation in ("attention of heads of 96", "products", "adapters"):
        name, why = found[operation]
        assert name == "reference"
        assert "not triton: Triton's lowering" in why


def test_it_refuses_with_its_reason(found: dict[str, str]) -> None:
    assert found["refusal"].startswith("the attention backend 'triton' cannot be used: Triton's lowering of jax")
