"""Shared cases of paged attention: a ragged batch over a poisoned pool, and a dense float64 answer.

Every backend is tested with the same cases; slots that no row owns hold NaN, and so does nothing of the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from pallas_kernels.paged_attention import make_plan
from pallas_kernels.paged_attention.api import Backend

__all__ = ["AttentionCase", "attend"]

_LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


@dataclass(frozen=True)
class AttentionCase:
    """A ragged batch: per row (query tokens, tokens in the cache); decodes first.

    Slots that no row owns, or that none of its row's queries sees through the window, hold NaN.
    """

    rows: tuple[tuple[int, int], ...]
    block_size: int = 16
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    dtype: str = "float32"  # of the queries, and of the pools if pool_dtype is None
    pool_dtype: str | None = None  # int8 and fp8 pools have scales
    window: int | None = None
    soft_cap: float | None = None
    decode_queries: int = 1
    tree: bool = False  # a random one for each decode row
    tokens: int | None = None  # query tokens with padding; by default a few more than there are
    num_blocks: int | None = None
    max_blocks: int | None = None  # width of the block tables
    seed: int = 0
    arrays: dict[str, NDArray[np.generic]] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        queries, lens = (np.array(x, np.int32) for x in zip(*self.rows, strict=True))
        per_row = -(-lens // self.block_size)
        num_blocks = self.num_blocks or int(per_row.sum()) + 4
        pool = (num_blocks, self.block_size, self.kv_heads, self.head_dim)
        k, v = (np.full(pool, np.nan, np.float32) for _ in range(2))
        ids = rng.permutation(np.arange(1, num_blocks))
        tables = np.zeros((len(lens) + 1, self.max_blocks or int(per_row.max()) + 3), np.int32)
        tokens = self.tokens or int(queries.sum()) + 3
        for row, length in enumerate(lens):
            own, ids = ids[: per_row[row]], ids[per_row[row] :]
            tables[row, : len(own)] = own
            for pool_array in (k, v):
                slots = pool_array[own].reshape(-1, self.kv_heads, self.head_dim)
                slots[:length] = rng.standard_normal((length, self.kv_heads, self.head_dim))
                if self.window is not None:  # what has left all windows may be gone
                    slots[: max(length - queries[row] - self.window + 1, 0)] = np.nan
                pool_array[own] = slots.reshape(len(own), *pool[1:])
        starts = np.concatenate([[0], np.cumsum(queries), [queries.sum()]]).astype(np.int32)  # one empty row at the end
        self.arrays.update(
            q=rng.standard_normal((tokens, self.heads, self.head_dim)).astype(self.dtype),
            query_start=starts,
            kv_lens=np.append(lens, 0).astype(np.int32),
            block_tables=tables,
            num_decode=np.int32((np.cumsum(queries > self.decode_queries) == 0).sum()),
            **self._stored("k", k),
            **self._stored("v", v),
        )
        if self.tree:
            self.arrays.update(tree=self._random_trees(rng))

    def _stored(self, name: str, values: NDArray[np.float32]) -> dict[str, NDArray[np.generic]]:
        dtype = self.pool_dtype or self.dtype
        if dtype not in _LARGEST:
            return {name: values.astype(dtype)}
        scale = np.abs(values).max(-1) / np.float32(_LARGEST[dtype])  # NaN in slots that no row owns
        numbers = values / scale[..., None]
        if dtype == "int8":
            numbers = np.nan_to_num(np.rint(numbers), nan=77)
        return {name: numbers.astype(dtype), f"{name}_scale": scale}

    def _random_trees(self, rng: np.random.Generator) -> NDArray[np.uint32]:
        """Every query sees itself, some query before it, and what that one sees."""
        shape = (len(self.rows) + 1, self.decode_queries, -(-self.decode_queries // 32) * 32)
        sees = np.zeros(shape, bool)
        sees[:, range(self.decode_queries), range(self.decode_queries)] = True
        for query in range(1, self.decode_queries):
            sees[:, query] |= sees[range(shape[0]), rng.integers(0, query, shape[0])]
        words = sees.reshape(*shape[:2], -1, 32) @ (1 << np.arange(32, dtype=np.uint64))
        return words.astype(np.uint32)

    def _pool(self, name: str, blocks: NDArray[np.int32], length: int) -> NDArray[np.float64]:
        """What a row has in the pool, [length, H, D], as the model meant it."""
        values = self.arrays[name][blocks].astype(np.float64)
        if f"{name}_scale" in self.arrays:
            values *= self.arrays[f"{name}_scale"][blocks][..., None]
        values = np.nan_to_num(values.reshape(-1, *values.shape[2:])[:length], nan=0.0)  # a zero weight's value
        return np.repeat(values, self.heads // self.kv_heads, 1)

    def _sees(self, row: int, queries: int, length: int) -> NDArray[np.bool_]:
        """Which of the row's cached tokens each of its query tokens sees, [queries, length]."""
        query_at, key_at = np.arange(length - queries, length)[:, None], np.arange(length)
        sees = key_at <= query_at
        if self.tree and row < self.arrays["num_decode"]:
            words = self.arrays["tree"][row, :queries]
            sees[:, length - queries :] = (words[:, np.arange(queries) // 32] >> (np.arange(queries) % 32)) & 1
            query_at = length - queries + sees[:, length - queries :].sum(1, keepdims=True) - 1
            key_at = np.minimum(key_at, length - queries)  # of the tree a window hides nothing
        if self.window is not None:
            sees &= key_at > query_at - self.window
        return sees

    def expected(self) -> NDArray[np.float64]:
        """The dense answer, row by row, in float64; zeros for padding tokens."""
        a = self.arrays
        out = np.zeros(a["q"].shape)
        for row, length in enumerate(a["kv_lens"]):
            first, last = a["query_start"][row], a["query_start"][row + 1]
            if first == last:
                continue
            blocks = a["block_tables"][row][: -(-length // self.block_size)]
            k, v = (self._pool(name, blocks, length) for name in "kv")
            scores = np.einsum("thd,nhd->htn", a["q"][first:last].astype(np.float64), k) * self.head_dim**-0.5
            if self.soft_cap is not None:
                scores = self.soft_cap * np.tanh(scores / self.soft_cap)
            scores = np.where(self._sees(row, last - first, length), scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[first:last] = np.einsum("htn,nhd->thd", weights / weights.sum(-1, keepdims=True), v)
        assert np.isfinite(out).all(), "a case must say what each of its tokens attends"
        return out


def attend(
    case: AttentionCase,
    backend: Backend,
    *,
    has_prefill: bool = True,
    optimised: bool = True,
    **changes: NDArray[np.generic],
) -> NDArray[np.float32]:
    """What the backend makes of the case, with some of its arrays changed; it must not be NaN.

    Not ``optimised``, XLA compiles in half the time; that is what interpreted kernels spend theirs on.
    """
    static = (case.decode_queries, has_prefill, case.head_dim**-0.5, case.window, case.soft_cap, optimised)
    run = _compiled(backend, *static)
    out = np.asarray(run({**case.arrays, **changes}).astype(jnp.float32))
    assert np.isfinite(out).all()
    return out


@cache
def _compiled(
    backend: Backend,
    decode_queries: int,
    has_prefill: bool,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    optimised: bool,
) -> Callable[[dict[str, jax.Array]], jax.Array]:
    @partial(jax.jit, compiler_options={} if optimised else {"xla_backend_optimization_level": 0})
    def run(a: dict[str, jax.Array]) -> jax.Array:
        plan = make_plan(
            a["query_start"],
            a["kv_lens"],
            a["block_tables"],
            a["num_decode"],
            num_tokens=a["q"].shape[0],
            decode_queries=decode_queries,
            has_prefill=has_prefill,
            tree=a.get("tree"),
        )
        scales = {name: a[name] for name in ("k_scale", "v_scale") if name in a}
        return backend(a["q"], a["k"], a["v"], plan, scale=scale, window=window, soft_cap=soft_cap, **scales)

    return run
