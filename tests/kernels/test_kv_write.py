"""Writing into and copying within a block pool."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_write import copy_blocks, kv_write


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_writes_land_at_their_slots_and_padding_nowhere(backend: str, dtype: str) -> None:
    pools = (np.zeros((3, 4, 1, 2), dtype), np.full((3, 4, 1, 2), -1, dtype))
    k = np.arange(8, dtype=np.float32).reshape(4, 1, 2) + 1
    slots = np.array([5, 11, 12, 13], np.int32)
    written = jax.jit(partial(kv_write, backend=backend))(tuple(map(jnp.asarray, pools)), k, 10 * k, slots)
    for out, before, new in zip(written, pools, (k, 10 * k), strict=True):
        expected = before.reshape(12, 1, 2).copy()
        expected[5], expected[11] = new[0], new[1]
        assert np.array_equal(np.asarray(out).reshape(12, 1, 2), expected)


def test_all_copies_read_before_any_is_written() -> None:
    cache = np.arange(4, dtype=np.float32).reshape(4, 1, 1, 1)
    out = np.asarray(jax.jit(copy_blocks)(cache, np.array([1, 2, 0]), np.array([2, 3, 0])))
    assert out.ravel().tolist() == [0, 1, 1, 2]


def test_donated_pools_are_updated_in_place(backend: str) -> None:
    pool = jax.ShapeDtypeStruct((64, 16, 3, 64), np.float32)
    new = jax.ShapeDtypeStruct((4, 3, 64), np.float32)
    compiled = (
        jax.jit(partial(kv_write, backend=backend), donate_argnums=0)
        .lower((pool, pool), new, new, jax.ShapeDtypeStruct((4,), np.int32))
        .compile()
    )
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == 2 * 64 * 16 * 3 * 64 * 4
    assert memory.temp_size_in_bytes < memory.alias_size_in_bytes / 16


def test_pools_that_are_not_donated_are_kept(backend: str) -> None:
    pools = (jnp.zeros((2, 4, 1, 2)), jnp.zeros((2, 4, 1, 2)))
    new = jnp.ones((1, 1, 2))
    written, _ = jax.jit(partial(kv_write, backend=backend))(pools, new, new, jnp.array([5], jnp.int32))
    assert np.asarray(written).sum() == 2
    assert np.asarray(pools[0]).sum() == 0


def test_beside_gpu_attention_the_scatter_writes() -> None:
    pools = (jnp.zeros((2, 4, 1, 2)), jnp.zeros((2, 4, 1, 2)))
    args = (pools, jnp.ones((1, 1, 2)), jnp.ones((1, 1, 2)), jnp.array([5], jnp.int32))
    texts = [jax.jit(partial(kv_write, backend=name)).lower(*args).as_text() for name in ("triton", "reference")]
    assert texts[0] == texts[1]
    assert texts[0].count('"stablehlo.scatter"(') == 2
