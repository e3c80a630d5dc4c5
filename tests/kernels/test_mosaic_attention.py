"""The Mosaic GPU backend of paged attention: interpreted with race detection, compiled for Hopper, and its refusals.

The interpreter runs every warpgroup in a thread of its own and fails when two accesses to memory are not ordered by
barriers; memory that nobody has written holds NaN. jax 0.10 has no such interpreter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_aot import toolchain
from cuda_aot.run import compile_cases, faults
from cuda_aot.targets import TARGETS

from pallas_kernels import tuning
from pallas_kernels.paged_attention import make_plan, mosaic, select_backend, triton
from tests.kernels.cases import AttentionCase, attend

TOLERANCE = {"bfloat16": 1.5e-2, "float16": 2e-3}

CASES = {
    "decodes": AttentionCase(
        ((1, 1), (1, 16), (1, 300), (1, 64), (1, 65), (1, 600)), heads=4, kv_heads=1, dtype="bfloat16", tokens=9
    ),
    "verifies in a window": AttentionCase(
        # Of 258 tokens in chunks of 256, two of four queries see nothing of the second.
        ((1, 100), (4, 7), (3, 400), (4, 258), (20, 30)),
        head_dim=128,
        dtype="float16",
        decode_queries=4,
        window=70,
        soft_cap=5.0,
        block_size=8,
    ),
    "decodes in a window": AttentionCase(
        ((1, 700), (1, 290), (1, 5), (1, 128)), dtype="float16", window=37, block_size=64, head_dim=64
    ),
    "more queries than a tile holds": AttentionCase(
        ((4, 258), (3, 50), (1, 9), (30, 40)), heads=40, kv_heads=1, dtype="bfloat16", decode_queries=4, block_size=32
    ),
}


@pytest.fixture
def interpreted(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., jax.Array]]:
    """The backend in the interpreter, with fewer programs than there are chunks."""
    if jax.__version_info__ < (0, 11):
        pytest.skip(f"the interpreter for Mosaic GPU comes with jax 0.11, and this is {jax.__version__}")
    from jax.experimental.pallas import mosaic_gpu

    monkeypatch.setattr(mosaic, "_PROGRAMS", 2)
    yield partial(mosaic.paged_attention, interpret=mosaic_gpu.InterpretGPUParams(detect_races=True))
    assert "RACE DETECTED" not in capfd.readouterr().out  # jax 0.11 prints it, later versions raise it


@pytest.mark.parametrize("name", CASES)
def test_equals_the_dense_answer(interpreted: Callable[..., jax.Array], name: str) -> None:
    case = CASES[name]
    has_prefill = any(queries > case.decode_queries for queries, _ in case.rows)
    found = attend(case, interpreted, has_prefill=has_prefill, optimised=False)
    np.testing.assert_allclose(found, case.expected(), atol=TOLERANCE[case.dtype], rtol=0)


def test_any_lengths_equal_the_dense_answer(interpreted: Callable[..., jax.Array]) -> None:
    rng = np.random.default_rng(5)
    for seed in range(4):  # one shape for all: they share a compiled program
        queries = rng.integers(1, 4, 5)
        lens = queries + rng.integers(0, [1, 70, 130, 270, 560])
        rows = tuple(zip(queries.tolist(), lens.tolist(), strict=True))
        case = AttentionCase(
            rows,
            heads=2,
            kv_heads=1,
            dtype="bfloat16",
            decode_queries=3,
            tokens=17,
            num_blocks=80,
            max_blocks=36,
            seed=seed,
        )
        found = attend(case, interpreted, has_prefill=False, optimised=False)
        np.testing.assert_allclose(found, case.expected(), atol=TOLERANCE["bfloat16"], rtol=0)


def test_a_row_has_the_same_bits_alone_and_in_any_batch(interpreted: Callable[..., jax.Array]) -> None:
    batch = AttentionCase(((1, 37), (1, 600), (1, 65)), heads=2, kv_heads=1, dtype="bfloat16", tokens=4)
    run = partial(attend, batch, interpreted, has_prefill=False, optimised=False)
    together, arrays = run(), batch.arrays
    alone = run(
        q=arrays["q"][1:3],  # a smaller bucket of tokens, rows and blocks
        query_start=np.array([0, 1, 1], np.int32),
        kv_lens=np.array([600, 0], np.int32),
        num_decode=np.int32(1),
        block_tables=arrays["block_tables"][[1, -1], :-1],
    )
    assert np.array_equal(together[1], alone[0])
    assert not alone[1:].any()


def test_prefill_goes_to_triton_while_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["verifies in a window"]
    arrays = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in case.arrays.items()}
    backends = {"triton": triton, "reference": mosaic.reference}
    for name, refused in (("triton", None), ("reference", "it is gone")):
        monkeypatch.setattr(triton, "refuse", lambda *_, refused=refused: refused)
        seen: list[str] = []
        for other, module in backends.items():
            serve = partial(_record, seen, other)
            monkeypatch.setattr(module, "paged_attention", serve)
        jax.eval_shape(lambda a: mosaic._prefill(a["q"], a["k"], a["v"], _plan(a, decode_queries=4), scale=1.0), arrays)
        assert seen == [name]


def _record(seen: list[str], name: str, q: jax.Array, *_: object, **__: object) -> jax.Array:
    seen.append(name)
    return q


def _plan(arrays: dict[str, jax.Array], **options: object) -> object:
    lists = (arrays[name] for name in ("query_start", "kv_lens", "block_tables", "num_decode"))
    return make_plan(*lists, num_tokens=arrays["q"].shape[0], **options)


@pytest.mark.parametrize("name", CASES)
def test_lowers_for_hopper(name: str) -> None:
    case = CASES[name]
    arrays = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in case.arrays.items()}
    options = {"scale": 0.1, "window": case.window, "soft_cap": case.soft_cap}

    @jax.jit
    def step(a: dict[str, jax.Array]) -> jax.Array:
        plan = _plan(a, decode_queries=case.decode_queries, has_prefill=False)
        return mosaic.paged_attention(a["q"], a["k"], a["v"], plan, **options)

    with _pretended_gpu():
        text = step.trace(arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == 1


def _pretended_gpu() -> contextlib.AbstractContextManager[object]:
    if jax.__version_info__ < (0, 11):
        return contextlib.nullcontext()
    device = jax.sharding.AbstractDevice("NVIDIA H200", platform="gpu", num_cores=132)
    mesh = jax.sharding.AbstractMesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


@pytest.mark.cuda_aot
def test_compiles_for_hopper_as_it_should() -> None:
    reason = toolchain.missing()
    if reason is not None:
        pytest.skip(reason)
    (report,) = compile_cases(TARGETS["sm_90"], ["paged_attention/mosaic decode/32x8x128"])
    assert faults(report) == []
    (kernel,) = report.kernels
    assert kernel.name.startswith("paged_attention_mosaic_decode")
    assert kernel.copies["cp.async.bulk.tensor"] > 0
    assert {name.split("n")[0] for name in kernel.matrix} == {"wgmma.m64"}
    assert set(report.program.steps) == {"kCommandBuffer"}, "Mosaic's launch is in the CUDA graph, too"


@pytest.mark.parametrize(
    ("head_dim", "dtype", "tree", "capability", "reason"),
    [
        (128, "bfloat16", False, 89, "it is made for compute capability 9.0, and a GPU has 8.9"),
        (128, "bfloat16", False, 100, "it is made for compute capability 9.0, and a GPU has 10.0"),
        (96, "bfloat16", False, 90, "it serves head dims of 64 and 128, not 96"),
        (128, "int8", False, 90, "it serves KV of bfloat16, float16, not int8"),
        (128, "float32", False, 90, "it serves KV of bfloat16, float16, not float32"),
        (128, "bfloat16", True, 90, "it has no tree masks"),
    ],
)
def test_refuses_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, head_dim: int, dtype: str, tree: bool, capability: int, reason: str
) -> None:
    monkeypatch.setattr(tuning, "target", lambda: tuning.Target("a GPU", capability))
    with pytest.raises(ValueError, match=f"'mosaic' cannot be used: {reason}"):
        select_backend("mosaic", head_dim=head_dim, dtype=dtype, tree=tree)


def test_refuses_without_a_gpu_and_without_mosaic(monkeypatch: pytest.MonkeyPatch) -> None:
    select = partial(select_backend, "mosaic", head_dim=128, dtype="bfloat16")
    with pytest.raises(ValueError, match="'mosaic' cannot be used: it runs on NVIDIA GPUs only"):
        select()
    monkeypatch.setattr(tuning, "target", lambda: tuning.Target("NVIDIA H200", 90))
    assert select() == ("mosaic", "asked for")

    def broken() -> None:
        raise ImportError("No module named 'absl'")

    monkeypatch.setattr(mosaic, "_kernel", broken)
    with pytest.raises(ValueError, match=r"Mosaic GPU of jax .* cannot be imported: No module named 'absl'"):
        select()


def test_is_chosen_by_itself_only_where_triton_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "target", lambda: tuning.Target("NVIDIA H200", 90))
    select = partial(select_backend, "auto", head_dim=128, dtype="bfloat16")
    assert select()[0] == "triton"
    monkeypatch.setattr(triton, "refuse", lambda *_: "it is gone")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert select()[0] == "mosaic"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"block_size": 24}, "it serves blocks of 8, 16, 32, 64 tokens, not 24"),
        ({"heads": 65, "kv_heads": 1}, "it serves up to 64 query heads per KV head, not 65"),
        ({"head_dim": 96}, "it serves head dims of 64 and 128, not 96"),
        ({"pool_dtype": "int8"}, "it has neither tree masks nor quantised pools"),
        ({"tree": True}, "it has neither tree masks nor quantised pools"),
    ],
)
def test_refuses_arguments_that_it_cannot_serve(changes: dict[str, object], reason: str) -> None:
    case = AttentionCase(((1, 30),), **{"dtype": "bfloat16", **changes})
    a = {name: jnp.asarray(x) for name, x in case.arrays.items()}
    scales = {name: a[name] for name in ("k_scale", "v_scale") if name in a}
    with pytest.raises(ValueError, match=f"Mosaic attention cannot serve this: {reason}"):
        mosaic.paged_attention(a["q"], a["k"], a["v"], _plan(a, tree=a.get("tree")), scale=1.0, **scales)
