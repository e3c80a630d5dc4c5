"""Whole forward programs, as the runner compiles them: the pools must be updated in place, in one CUDA graph."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np

from cuda_aot.case import Case, Make, array
from cuda_aot.targets import Target
from jaxserve.layers import KVCache, KVLayer
from jaxserve.models.registry import param_specs
from jaxserve.models.spec import ParamSpec
from jaxserve.roofline import MODELS, Precision, kv_token_bytes, weight_bytes
from jaxserve.runner.batch import make_step_input
from jaxserve.runner.buckets import Bucket, Buckets
from jaxserve.runner.programs import Newest, forward
from jaxserve.speculative import DraftState

__all__ = ["STEPS"]

_ROWS, _CHUNK, _BLOCK, _CONTEXT = 64, 512, 16, 8192
_MIB = 1 << 20
# Of the memory, for weights and KV. XLA believes that it may use 80 % of a device that it does not see, and computes
# some things twice rather than use more.
_ROOM = 0.7
_MOST_KV = 64 << 30
# A step's scratch is a few arrays of activations and the parts of split attention.
_TEMP_LIMIT = {False: 64 * _MIB, True: 256 * _MIB}


def _step(target: Target, *, model: str, has_prefill: bool, backend: str) -> Case | None:
    config = MODELS[model]
    token_bytes = int(kv_token_bytes(config, Precision()))
    room = int(target.chip.memory * _ROOM - weight_bytes(config, Precision()))
    num_blocks = min(room, _MOST_KV) // (token_bytes * _BLOCK)
    if num_blocks * _BLOCK < _CONTEXT:
        return None
    # No more than rows can use: a pool that is mostly out of reach proves nothing.
    num_blocks = min(num_blocks, _ROWS * _CONTEXT // _BLOCK + 1)
    bucket = Bucket(_CHUNK if has_prefill else _ROWS, _ROWS, has_prefill)
    pool: Any = array(num_blocks, _BLOCK, config.num_kv_heads, config.head_dim)
    params = jax.tree.map(
        lambda spec: array(*spec.shape), param_specs(config, "hf"), is_leaf=lambda leaf: isinstance(leaf, ParamSpec)
    )
    step: Any = make_step_input([], bucket, max_blocks=_CONTEXT // _BLOCK, buckets=Buckets(_CHUNK, _ROWS))
    rows: Any = np.zeros(_ROWS + 1, np.int32)
    newest = Newest(rows, rows, DraftState(array(_ROWS + 1, 0, dtype="int32")))
    return Case(
        partial(forward, config=config, bucket=bucket, max_places=_ROWS, backend=backend),
        (params, KVCache((KVLayer(pool, pool),) * config.num_layers), newest, step),
        donate=(1,),
        pool=f"bf16[{','.join(map(str, pool.shape))}]",
        expected={
            "kv_bytes": token_bytes * num_blocks * _BLOCK,
            "layers": config.num_layers,
            "temp_limit": _TEMP_LIMIT[has_prefill],
        },
    )


def _cases(backend: str) -> dict[str, Make]:
    return {
        f"step/{model}/{'mixed' if has_prefill else 'decode'}": partial(
            _step, model=model, has_prefill=has_prefill, backend=backend
        )
        for model in ("smollm2-135m", "llama-3.1-8b")
        for has_prefill in (False, True)
    }


STEPS: dict[str, Make] = _cases("triton")
