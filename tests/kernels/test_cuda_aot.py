"""Pallas kernels and whole steps, compiled to machine code for GPUs that are not there.

A few cases of each kind; ``tools/compile_kernels.py`` compiles all.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cuda_aot import toolchain
from cuda_aot.program import copies_of
from cuda_aot.reports import Kernel, Program, Report
from cuda_aot.resources import read_kernels
from cuda_aot.run import compile_cases, faults
from cuda_aot.targets import TARGETS

ATTENTION = (
    "paged_attention/mixed/32x8x128",
    "paged_attention/mixed/9x3x64",
    "paged_attention/decode/32x8x128/int8",
    "paged_attention/verify/32x8x128/16 of a tree",
)
PRODUCTS = (
    "packed_matmul/int4/4096x4096/64",
    "packed_matmul/int8/4096x4096/64",
    "lora_matmul/14336x4096/128/bfloat16",
)
FLOAT8 = "paged_attention/decode/32x8x128/float8_e4m3fn"
CASES = {
    "sm_80": (ATTENTION[0], ATTENTION[2], PRODUCTS[0], PRODUCTS[2], "step/smollm2-135m/decode"),
    "sm_89": (ATTENTION[0], PRODUCTS[1], FLOAT8),
    "sm_90": (
        *ATTENTION,
        *PRODUCTS,
        FLOAT8,
        "step/smollm2-135m/decode",
        "packed_matmul/int4/4096x4096/2048",
        "step/smollm2-135m/mixed",
        "step/smollm2-135m/compact",
        "step/smollm2-135m/copy",
        "step/smollm2-135m/propose a tree",
        "step/llama-3.1-8b/decode",
        "xla/rms_norm",
        "xla/kv_write",
        "xla/int4 product, scale per group",
        "xla/int8 product, scale per group",
        "xla/int4 product, scale per group, bfloat16",
    ),
}
Reports = dict[tuple[str, str], Report]


def needs_compiler() -> None:
    reason = toolchain.missing()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def reports() -> Reports:
    """All cases, compiled once."""
    needs_compiler()
    found = (report for name, cases in CASES.items() for report in compile_cases(TARGETS[name], cases))
    return {(report.target, report.case): report for report in found}


@pytest.mark.cuda_aot
@pytest.mark.parametrize(("target", "case"), [(target, case) for target, cases in CASES.items() for case in cases])
def test_compiles_as_it_should(reports: Reports, target: str, case: str) -> None:
    assert faults(reports[target, case]) == []


@pytest.mark.cuda_aot
@pytest.mark.parametrize("target", CASES)
def test_attention_is_made_of_matrix_products_and_asynchronous_copies(reports: Reports, target: str) -> None:
    kernels = {kernel.name: kernel for kernel in reports[target, "paged_attention/mixed/32x8x128"].kernels}
    decode, prefill = kernels["paged_attention_decode"], kernels["paged_attention_prefill"]
    assert set(kernels) == {decode.name, prefill.name, "paged_attention_combine"}
    assert "mma.m16n8k16" in decode.matrix
    assert any(name.startswith("wgmma" if target == "sm_90" else "mma") for name in prefill.matrix)
    for kernel in (decode, prefill):
        assert kernel.copies["cp.async.cg"] > 0, "keys and values are copied 16 bytes at a time"
        assert kernel.resident >= 1
    # Decoding moves bytes: a multiprocessor keeps them in flight for several blocks.
    assert decode.resident >= 2


@pytest.mark.cuda_aot
@pytest.mark.parametrize("target", CASES)
def test_products_with_weights_and_adapters_are_made_by_matrix_units(reports: Reports, target: str) -> None:
    for case in set(PRODUCTS) & set(CASES[target]):
        kernels = reports[target, case].kernels
        names = {"lora_shrink", "lora_expand"} if case.startswith("lora") else {"packed_matmul"}
        assert {kernel.name for kernel in kernels} == names
        for kernel in kernels:
            assert any("mma" in name for name in kernel.matrix), f"{case}: {kernel.name}"
            assert kernel.copies["cp.async.cg"] > 0
    if target == "sm_90":
        for tokens, columns in ((64, 64), (2048, 128)):
            (kernel,) = reports[target, f"packed_matmul/int4/4096x4096/{tokens}"].kernels
            assert set(kernel.matrix) == {f"wgmma.m64n{columns}k16"}


@pytest.mark.cuda_aot
def test_a_layer_of_a_step_is_a_few_kernels(reports: Reports) -> None:
    for case in ("step/smollm2-135m/decode", "step/llama-3.1-8b/decode"):
        report = reports["sm_90", case]
        assert report.program is not None
        assert report.expected is not None
        launches, layers = report.program.launches, report.expected["layers"]
        assert launches["paged_attention_decode"] == launches["paged_attention_combine"] == layers
        assert sum(launches.values()) < 15 * layers


@pytest.mark.cuda_aot
def test_weights_of_groups_are_what_xla_does_not_fuse(reports: Reports) -> None:
    """The reason for a kernel of our own: XLA writes the weights out in floats before it multiplies."""
    for case, item_size in (
        ("int4 product, scale per group", 4),
        ("int8 product, scale per group", 4),
        ("int4 product, scale per group, bfloat16", 2),
    ):
        program = reports["sm_90", f"xla/{case}"].program
        assert program is not None
        assert program.temp_bytes >= 4096 * 4096 * item_size
    norm, write = (reports["sm_90", f"xla/{name}"].program for name in ("rms_norm", "kv_write"))
    assert norm is not None
    assert write is not None
    assert norm.temp_bytes < 4096
    assert write.alias_bytes == 2 * 4096 * 16 * 8 * 128 * 2


@pytest.mark.cuda_aot
def test_spills_are_found(tmp_path: Path) -> None:
    """A kernel that keeps 64 values and may have 24 registers."""
    needs_compiler()
    count = 64
    lines = [
        ".version 8.0\n.target sm_80\n.address_size 64",
        ".visible .entry crowded(.param .u64 p)\n.maxntid 128, 1, 1\n.maxnreg 24\n{",
        f".reg .f32 %f<{count + 1}>;\n.reg .b64 %d<2>;\nld.param.u64 %d1, [p];",
        *(f"ld.volatile.global.f32 %f{i}, [%d1+{4 * i}];" for i in range(1, count + 1)),
        "bar.sync 0;",
        *(f"st.volatile.global.f32 [%d1+{4 * (count - i)}], %f{i};" for i in range(1, count + 1)),
        "ret;\n}",
    ]
    path = tmp_path / "crowded.ptx"
    path.write_text("\n".join(lines))
    (kernel,) = read_kernels([path], TARGETS["sm_80"], {"crowded": 2048})
    assert (kernel.threads, kernel.registers, kernel.shared) == (128, 24, 2048)
    assert kernel.spills >= 4 * (count - 24)
    assert faults(Report("case", "sm_80", 1.0, kernels=(kernel,))) == [f"crowded spills {kernel.spills} bytes"]


def test_copies_of_a_pool_are_found() -> None:
    hlo = """
      %copy.7 = bf16[32,16,8,128]{3,2,1,0} copy(%p)
      ROOT %copy-start.1 = (bf16[32,16,8,128]{3,2,1,0}, bf16[32,16,8,128]{3,2,1,0}, u32[]) copy-start(%q)
      %copy.9 = bf16[32,16,8]{2,1,0} copy(%r)
      %scatter.1 = bf16[32,16,8,128]{3,2,1,0} scatter(%copy.9, %s)
    """
    assert copies_of("bf16[32,16,8,128]", hlo) == ("copy.7", "copy-start.1")


GOOD = Program(
    argument_bytes=10, alias_bytes=8, temp_bytes=3, pool_copies=(), launches={"k": 1}, steps={"kCommandBuffer": 1}
)
EXPECTED = {"kv_bytes": 8, "layers": 1, "temp_limit": 3}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alias_bytes": 4}, "4 bytes are updated in place, and the pools have 8"),
        ({"temp_bytes": 4}, "4 bytes of scratch, more than 3"),
        ({"pool_copies": ("copy.1",)}, "copy.1 copies a pool"),
        ({"launches": {"fusion_3_remat2": 1}}, "computed twice to save memory: fusion_3_remat2"),
        ({"steps": {"kCommandBuffer": 2, "kWhile": 1}}, "not one CUDA graph"),
    ],
)
def test_faults_of_programs_are_told(change: dict[str, object], message: str) -> None:
    good = {name: getattr(GOOD, name) for name in Program.__slots__}
    assert faults(Report("case", "sm_90", 1.0, program=GOOD, expected=EXPECTED)) == []
    (fault,) = faults(Report("case", "sm_90", 1.0, program=Program(**{**good, **change}), expected=EXPECTED))
    assert message in fault


def test_a_crash_costs_one_case(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A compiler that aborts at the second case; the others are compiled all the same."""
    worker = tmp_path / "python"
    worker.write_text(
        f"#!{sys.executable}\n"
        "import json, os, sys\n"
        "for name in sys.argv[4:]:\n"
        "    if name == 'b':\n"
        "        print('what it said', file=sys.stderr, flush=True)\n"
        "        os.abort()\n"
        "    report = dict(case=name, target=sys.argv[3], seconds=1.0, kernels=[], program=None)\n"
        "    print(json.dumps(report), flush=True)\n"
    )
    worker.chmod(0o755)
    monkeypatch.setattr("cuda_aot.run.sys.executable", str(worker))
    found = list(compile_cases(TARGETS["sm_80"], ["a", "b", "c"]))
    assert [report.case for report in found] == ["a", "b", "c"]
    assert [report.error is None for report in found] == [True, False, True]
    assert "ended with -6: what it said" in str(found[1].error)


def test_a_report_survives_the_way_between_processes() -> None:
    kernel = Kernel("k", 128, 96, 1024, 0, 0, 5, {"mma.m16n8k16": 2}, {})
    report = Report("case", "sm_90", 1.5, kernels=(kernel,), program=GOOD, expected=EXPECTED)
    assert Report.from_json(report.to_json()) == report


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "expected"),
    [
        (128, 96, 39168, 5),  # registers: 4 x (16384 // 3072) = 20 warps
        (128, 32, 0, 16),  # threads: 2048 // 128
        (128, 184, 82128, 2),  # shared memory: 228 KiB // 81 KiB
        (32, 16, 0, 32),  # blocks
        (1024, 255, 0, 0),  # more registers than there are
    ],
)
def test_resident_blocks_of_an_h200(threads: int, registers: int, shared: int, expected: int) -> None:
    assert TARGETS["sm_90"].resident_blocks(threads, registers, shared) == expected


def test_missing_wheels_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(toolchain, "_FOLDER", tmp_path)
    reason = toolchain.missing()
    assert reason is not None
    assert "jax-cuda12-pjrt" in reason
    assert "compile_kernels.py --install" in reason


def test_wheels_that_cannot_be_had_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(toolchain, "_FOLDER", tmp_path / "cuda-aot")
    monkeypatch.setattr(toolchain, "CUDA", "0.0.1")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(subprocess.CalledProcessError):
        toolchain.install()
    assert toolchain.missing() is not None
    assert list(tmp_path.iterdir()) == []
