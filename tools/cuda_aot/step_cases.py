"""Whole programs of a step, as the runner compiles them: the pools must be updated in place, in one CUDA graph."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from cuda_aot.case import Case, Make, array
from cuda_aot.targets import Target
from jaxserve.layers import KVCache, KVLayer
from jaxserve.models.config import ModelConfig
from jaxserve.models.registry import param_specs
from jaxserve.models.spec import ParamSpec
from jaxserve.roofline import MODELS, Precision, kv_token_bytes, weight_bytes
from jaxserve.runner.batch import make_step_input
from jaxserve.runner.buckets import Bucket, Buckets
from jaxserve.runner.drafter import COPIES
from jaxserve.runner.programs import Newest, compact, copy_blocks, forward, propose
from jaxserve.sampling import RowState
from jaxserve.speculative import DraftState, EagleHead, EagleProposer, ProposeInput, eagle_specs

__all__ = ["STEPS"]

_ROWS, _CHUNK, _BLOCK, _CONTEXT = 64, 512, 16, 8192
_DEPTH = 6  # of trees
_MIB = 1 << 20
# Of the memory, for weights and KV. XLA believes that it may use 80 % of a device that it does not see, and computes
# some things twice rather than use more.
_ROOM = 0.7
_MOST_KV = 64 << 30
# A step's scratch is a few arrays of activations and the parts of split attention.
_TEMP_LIMIT = {False: 64 * _MIB, True: 256 * _MIB}
_LOGITS_LIMIT = 512 * _MIB  # of all nodes that a tree follows, and a copy that is sorted


def _pools(target: Target, config: ModelConfig, *, state_size: int = 0) -> tuple[KVCache, dict[str, int], str] | None:
    """A cache that fills the chip beside the weights, its size for ``Case.expected``, and a pool as HLO writes it."""
    token_bytes = int(kv_token_bytes(config, Precision())) + 2 * state_size
    room = int(target.chip.memory * _ROOM - weight_bytes(config, Precision()))
    num_blocks = min(room, _MOST_KV) // (token_bytes * _BLOCK)
    if num_blocks * _BLOCK < _CONTEXT:
        return None
    # No more than rows can use: a pool that is mostly out of reach proves nothing.
    num_blocks = min(num_blocks, _ROWS * _CONTEXT // _BLOCK + 1)
    pool: Any = array(num_blocks, _BLOCK, config.num_kv_heads, config.head_dim)
    states: Any = array(num_blocks, _BLOCK, state_size) if state_size else None
    expected = {"kv_bytes": token_bytes * num_blocks * _BLOCK, "layers": config.num_layers}
    return KVCache((KVLayer(pool, pool),) * config.num_layers, states), expected, _hlo(pool)


def _hlo(pool: jax.ShapeDtypeStruct) -> str:
    return f"bf16[{','.join(map(str, pool.shape))}]"


def _step(target: Target, *, model: str, has_prefill: bool, backend: str) -> Case | None:
    config = MODELS[model]
    found = _pools(target, config)
    if found is None:
        return None
    kv, expected, pool = found
    bucket = Bucket(_CHUNK if has_prefill else _ROWS, _ROWS, has_prefill)
    params = jax.tree.map(
        lambda spec: array(*spec.shape), param_specs(config, "hf"), is_leaf=lambda leaf: isinstance(leaf, ParamSpec)
    )
    step: Any = make_step_input([], bucket, max_blocks=_CONTEXT // _BLOCK, buckets=Buckets(_CHUNK, _ROWS))
    rows: Any = np.zeros(_ROWS + 1, np.int32)
    newest = Newest(rows, rows, DraftState(array(_ROWS + 1, 0, dtype="int32")))
    return Case(
        partial(forward, config=config, bucket=bucket, max_places=_ROWS, backend=backend),
        (params, kv, newest, step),
        donate=(1,),
        pool=pool,
        expected=expected | {"temp_limit": _TEMP_LIMIT[has_prefill]},
    )


def _compact(target: Target, *, model: str, backend: str) -> Case | None:
    """What follows the verification of trees, with hidden states beside the KV."""
    config = MODELS[model]
    found = _pools(target, config, state_size=config.hidden_size)
    if found is None:
        return None
    kv, expected, pool = found
    rows = jax.eval_shape(partial(RowState.zeros, _ROWS, config.vocab_size, history=_CONTEXT, max_depth=_DEPTH))
    work: Any = (np.zeros(_ROWS, np.int32), np.zeros((_ROWS, _CONTEXT // _BLOCK), np.int32))
    return Case(
        partial(compact, backend=backend),
        (kv, rows, *work),
        donate=(0,),
        pool=pool,
        expected=expected | {"temp_limit": _TEMP_LIMIT[False]},
    )


def _copy(target: Target, *, model: str) -> Case | None:
    """Copy on write."""
    config = MODELS[model]
    found = _pools(target, config, state_size=config.hidden_size)
    if found is None:
        return None
    kv, expected, pool = found
    pairs: Any = (np.zeros(COPIES, np.int32), np.zeros(COPIES, np.int32))
    return Case(
        copy_blocks, (kv, *pairs), donate=(0,), pool=pool, expected=expected | {"temp_limit": _TEMP_LIMIT[False]}
    )


def _propose(target: Target, *, model: str, width: int, backend: str) -> Case | None:
    """Drafts of an EAGLE head, in a chain or a tree, whose own pools lie beside the hidden states."""
    config = MODELS[model]
    found = _pools(target, config, state_size=config.hidden_size)
    if found is None:
        return None
    kv, _, _ = found
    layer = replace(config, num_layers=1, windows=config.windows[:1], rope_layers=config.rope_layers[:1])
    head = EagleHead(layer)
    proposer = EagleProposer(_DEPTH, head, "bfloat16", backend, width, _DEPTH if width == 1 else 3)
    own, states = kv.layers[0].k, kv.states
    state = jax.eval_shape(partial(proposer.initial, _ROWS, *own.shape[:2]))
    like = partial(jax.tree.map, lambda spec: array(*spec.shape), is_leaf=lambda leaf: isinstance(leaf, ParamSpec))
    params = like(eagle_specs(head, config.vocab_size))
    table = array(config.vocab_size, config.hidden_size)
    params |= {"embed": table, "out": table, "vocabulary": None}
    drafts: Any = jax.eval_shape(partial(DraftState.empty, _ROWS, _DEPTH, is_tree=width > 1))
    rows = jax.eval_shape(
        partial(RowState.zeros, _ROWS, config.vocab_size, history=_CONTEXT, max_depth=proposer.max_depth)
    )
    seeds, hidden = array(_ROWS, 2, dtype="uint32"), array(_ROWS, config.hidden_size)
    at, is_real, tables = array(_ROWS, dtype="int32"), array(_ROWS, dtype="bool"), array(_ROWS, 512, dtype="int32")
    work: Any = ProposeInput(at, is_real, tables, seeds, array(_ROWS, dtype="float32"), hidden, states)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((drafts, state)))
    return Case(
        partial(propose, proposer=proposer),
        (params, drafts, state, rows, work),
        donate=(1, 2),
        pool=_hlo(own),
        expected={"kv_bytes": size, "layers": 1, "temp_limit": _LOGITS_LIMIT},
    )


def _cases(backend: str) -> dict[str, Make]:
    models = ("smollm2-135m", "llama-3.1-8b")
    steps = {
        f"step/{model}/{'mixed' if has_prefill else 'decode'}": partial(
            _step, model=model, has_prefill=has_prefill, backend=backend
        )
        for model in models
        for has_prefill in (False, True)
    }
    moves = {f"step/{model}/compact": partial(_compact, model=model, backend=backend) for model in models}
    drafts = {
        f"step/{model}/propose a {'tree' if width > 1 else 'chain'}": partial(
            _propose, model=model, width=width, backend=backend
        )
        for model in models
        for width in (1, 4)
    }
    return steps | drafts | moves | {f"step/{model}/copy": partial(_copy, model=model) for model in models}


STEPS: dict[str, Make] = _cases("triton")
