"""The decoder unrolled over layers, as it is, against a scan over stacked weights and pools.

Both run the same function of one layer: the model's decoder with a single layer, whose embedding is the hidden states
that go in. So a layer has one lookup and one norm more than in the model, in both.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gpu.model import LLAMA_8B, TINY, random_params, with_layers
from gpu.results import Result, Target
from gpu.session import Session
from gpu.timing import Timing, measure
from jaxserve.layers import KVCache
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import DecoderInput, decode
from pallas_kernels.paged_attention import make_plan, select_backend

__all__ = ["scan_speed"]

_LAYERS, _BATCH, _CONTEXT, _BLOCK_SIZE = 8, 32, 2048, 16
_CALLS = 10


def scan_speed(session: Session) -> Iterator[Result]:
    """Milliseconds of a step of decodes, and its scratch memory."""
    config = TINY if session.dry else with_layers(LLAMA_8B, _LAYERS)
    batch, context = (2, 40) if session.dry else (_BATCH, _CONTEXT)
    layer, step = partial(_layer, config), _decodes(batch, context)
    layers = random_params(config)["layers"]
    x = jax.random.normal(jax.random.key(2), (batch, config.hidden_size), jnp.bfloat16)
    blocks = batch * -(-context // _BLOCK_SIZE) + 1
    caches = [_cache(config, blocks) for _ in layers]
    # Before the first step: it is given the caches for good.
    stacked = [jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts) for parts in (layers, caches)]
    first, timing, scratch = _time(partial(_unrolled, layer, step), x, layers, caches)
    yield Result("unrolled", {"ms": 1e3 * timing.seconds, "MiB of scratch": scratch})
    second, scanned, scratch = _time(partial(_scanned, layer, step), x, *stacked)
    yield Result("scan", {"ms": 1e3 * scanned.seconds, "MiB of scratch": scratch})
    times, difference = scanned.seconds / timing.seconds, float(np.abs(first - second).max())
    yield Result(
        "scan against unrolled",
        {"× the time": times, "largest difference": difference},
        (Target("× the time", least=1),),
        note="unrolled is what jaxserve does",
    )


def _layer(config: ModelConfig, step: DecoderInput, x: jax.Array, layer: Any, kv: KVCache) -> tuple[jax.Array, KVCache]:
    params = {"embed": x, "layers": [layer], "final_norm": jnp.ones(config.hidden_size, x.dtype)}
    backend, _ = select_backend("auto", head_dim=config.head_dim, dtype=x.dtype.name)
    return decode(params, with_layers(config, 1), step, kv, backend=backend)


def _unrolled(
    layer: Any, step: DecoderInput, x: jax.Array, layers: list[Any], caches: list[KVCache]
) -> tuple[jax.Array, list[KVCache]]:
    done = []
    for weights, kv in zip(layers, caches, strict=True):
        x, kv = layer(step, x, weights, kv)
        done.append(kv)
    return x, done


def _scanned(layer: Any, step: DecoderInput, x: jax.Array, layers: Any, caches: KVCache) -> tuple[jax.Array, KVCache]:
    return jax.lax.scan(lambda x, each: layer(step, x, *each), x, (layers, caches))


def _decodes(batch: int, context: int) -> DecoderInput:
    """One token of each row, at the end of its context; token i is row i of the hidden states."""
    per_row = -(-context // _BLOCK_SIZE)
    tables = jnp.arange(1, batch * per_row + 1, dtype=jnp.int32).reshape(batch, per_row)
    rows = jnp.arange(batch, dtype=jnp.int32)
    plan = make_plan(
        jnp.arange(batch + 1, dtype=jnp.int32),
        jnp.full(batch, context, jnp.int32),
        tables,
        jnp.int32(batch),
        num_tokens=batch,
        has_prefill=False,
    )
    last = context - 1
    slots = tables[:, last // _BLOCK_SIZE] * _BLOCK_SIZE + last % _BLOCK_SIZE
    return DecoderInput(rows, jnp.full(batch, last, jnp.int32), slots, plan)


def _cache(config: ModelConfig, blocks: int) -> KVCache:
    shape = (blocks, _BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    zeros = KVCache.zeros(1, shape, jnp.dtype(jnp.bfloat16))
    return jax.tree.map(lambda pool: jax.random.normal(jax.random.key(3), pool.shape, pool.dtype), zeros)


def _time(function: Any, x: jax.Array, layers: Any, caches: Any) -> tuple[np.ndarray, Timing, float]:
    """The result of a first step, the time of a step, and its scratch memory in MiB; the caches are donated."""
    step = jax.jit(function, donate_argnums=2).lower(x, layers, caches).compile()
    state = [caches]

    def run(calls: int = 1) -> jax.Array:
        for _ in range(calls):
            out, state[0] = step(x, layers, state[0])
        return out

    result = np.asarray(run().astype(jnp.float32))
    return result, measure(partial(run, _CALLS), calls=_CALLS), step.memory_analysis().temp_size_in_bytes / 2**20
