"""Writing into and copying within a block pool."""

from __future__ import annotations

import jax
import numpy as np

from pallas_kernels.kv_write import copy_blocks, kv_write


def test_writes_land_at_their_slots_and_padding_nowhere() -> None:
    cache = np.zeros((3, 4, 1, 2), np.float32)
    new = np.arange(8, dtype=np.float32).reshape(4, 1, 2) + 1
    out = np.asarray(jax.jit(kv_write)(cache, new, np.array([5, 11, 12, 13])))
    expected = np.zeros((12, 1, 2), np.float32)
    expected[5], expected[11] = new[0], new[1]
    assert np.array_equal(out.reshape(12, 1, 2), expected)


def test_all_copies_read_before_any_is_written() -> None:
    cache = np.arange(4, dtype=np.float32).reshape(4, 1, 1, 1)
    out = np.asarray(jax.jit(copy_blocks)(cache, np.array([1, 2, 0]), np.array([2, 3, 0])))
    assert out.ravel().tolist() == [0, 1, 1, 2]


def test_a_donated_pool_is_updated_in_place() -> None:
    shapes = (jax.ShapeDtypeStruct((64, 16, 3, 64), np.float32),) * 1
    compiled = (
        jax.jit(kv_write, donate_argnums=0)
        .lower(*shapes, jax.ShapeDtypeStruct((4, 3, 64), np.float32), jax.ShapeDtypeStruct((4,), np.int32))
        .compile()
    )
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == 64 * 16 * 3 * 64 * 4
    assert memory.temp_size_in_bytes < memory.alias_size_in_bytes / 8
