"""``tools/gpu_check.py`` and ``tools/tune_kernels.py``: dry runs of both, and what happens when things go wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_check
import jax
import pytest
import tune_kernels
from gpu.correctness import kernels_are_right
from gpu.results import Result, Target
from gpu.sections import Section, run_sections
from gpu.session import Session, chip_of, open_session
from gpu.tune import Launch, Tuned, Work, tune, write

from pallas_kernels import tuning
from pallas_kernels.paged_attention import triton


def run(monkeypatch: pytest.MonkeyPatch, tool: Any, *args: object) -> int:
    monkeypatch.setattr("sys.argv", [tool.__name__, *map(str, args)])
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr("sys.path", [*sys.path])
    return tool.main()


def test_check_dry_asks_everything(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.json"
    assert run(monkeypatch, gpu_check, "--dry", "--out", out) == 0, capsys.readouterr().err
    found = json.loads(out.read_text())
    assert [section["name"] for section in found["sections"]] == [section.name for section in gpu_check.all_sections()]
    assert {section["state"] for section in found["sections"]} == {"done"}
    lines = {line["what"]: line for section in found["sections"] for line in section["results"]}
    assert all("Error" not in line["note"] for line in lines.values())
    checks = [line for line in lines.values() if line["verdict"] in ("ok", "WRONG")]
    assert lines["3 of 40, skewed, bfloat16"]["figures"]["µs"] > 0
    assert lines["3 of 40, skewed, bfloat16: against the gather"]["figures"]["× the gather"] > 0
    has_mosaic = jax.__version_info__ >= (0, 11)  # its interpreter, that is
    assert len(checks) == 3 + has_mosaic
    if has_mosaic:
        assert lines["3 of 40, skewed, bfloat16: against the Mosaic kernel"]["figures"]["× the Mosaic kernel"] > 0
    else:
        assert lines["the Mosaic kernel"]["note"].startswith("skipped: its interpreter comes with jax 0.11")
    assert lines["2 decodes at 40"]["targets"] == ["≥ 75 % of roofline"]
    assert lines["2 decodes at 40: equal rows"]["figures"] == {"% that agree": 100}
    table = capsys.readouterr().out
    assert "≥ 75 % of roofline" in table
    assert "scan against unrolled" in table


def test_tune_dry_times_a_launch_of_every_operation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launches = ["paged_attention/decode/b1/d128", "packed_matmul/decode/b2/int4", "lora_matmul/b2/r16"]
    chosen = [argument for name in launches for argument in ("--only", name)]
    assert run(monkeypatch, tune_kernels, "--dry", *chosen, "--out", tmp_path) == 0
    printed = capsys.readouterr().out
    assert [line.split(":")[0] for line in printed.splitlines() if line[0] != " " and "/tuned/" not in line] == launches
    assert printed.count("µs  as it is") == len(launches)
    assert "Error" not in printed
    for path in tmp_path.rglob("*.json"):
        assert path.name == "dry_run.json"
        assert all(json.loads(path.read_text()).values())


def fake_tuned(shape_class: str, best: dict[str, int]) -> Tuned:
    launch = Launch("paged_attention", shape_class, triton.Sizes, [], lambda session: Work(lambda sizes: abs, (), 1))
    return Tuned(launch, best=best)


def test_only_what_was_tuned_is_written_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tuning, "__file__", str(tmp_path / "tuning.py"))
    tuning._read.cache_clear()
    first = [fake_tuned("decode/b2/d128", {"keys": 32}), fake_tuned("decode/b2/d64", {"num_warps": 2})]
    (path,) = write(tmp_path, "NVIDIA H200", first)
    assert path == tmp_path / "paged_attention" / "tuned" / "nvidia_h200.json"
    write(tmp_path, "NVIDIA H200", [fake_tuned("decode/b2/d64", {}), fake_tuned("prefill/b2/d64", {"rows": 128})])
    assert tuning.lookup("paged_attention", "NVIDIA H200", "decode/b2/d128") == {"keys": 32}
    assert tuning.lookup("paged_attention", "NVIDIA H200", "decode/b2/d64") == {}
    assert tuning.lookup("paged_attention", "NVIDIA H200", "prefill/b2/d64") == {"rows": 128}
    tuning._read.cache_clear()
    nothing = [fake_tuned(name, {}) for name in ("decode/b2/d128", "prefill/b2/d64")]
    assert write(tmp_path, "NVIDIA H200", nothing) == []
    assert not path.exists()


@pytest.fixture
def session() -> Session:
    return open_session(60, dry=True)


def scaled(sizes: triton.Sizes) -> Any:
    """A kernel that refuses one size and is wrong with another."""
    if sizes.keys == 128:
        raise ValueError("too much shared memory")
    factor = 2.0 if sizes.keys == 32 else 1.0
    return lambda x: x * factor


def test_candidates_that_fail_or_are_wrong_are_left_out_with_a_reason(session: Session) -> None:
    candidates = [{"keys": 64}, {"keys": 128}, {"keys": 32}, {"num_stages": 2}]
    work = Work(scaled, (jax.numpy.ones(8),), 1)
    tuned = tune(
        Launch("paged_attention", "decode/b2/d128", triton.Sizes, candidates, lambda _: work), session, "sm_90"
    )
    assert tuned.times.keys() == {"as it is", "num_stages=2"}  # 64 keys are the chip's own
    assert tuned.reasons == {
        "keys=128": "ValueError: too much shared memory",
        "keys=32": "its result differs from that of the chip's sizes",
    }


def test_without_time_sections_are_skipped(session: Session) -> None:
    ran = []

    def section(name: str) -> Any:
        def run(session: Session) -> Iterator[Result]:
            ran.append(name)
            yield Result(name)

        return run

    sections = [Section("long", 100, section("long")), Section("short", 5, section("short"))]
    long, short = run_sections(sections, session, lambda line: None)
    assert ran == ["short"]
    assert (long.state, short.state) == ("skipped", "done")
    assert long.note == "it needs 100 s, and 60 s are left"
    assert long.faults == []


def test_a_budget_of_nothing_runs_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, gpu_check, "--dry", "--budget", "0") == 0
    assert capsys.readouterr().out.count("skipped") == len(gpu_check.all_sections())


def found(session: Session) -> Iterator[Result]:
    yield Result("rate", {"GB/s": 2.0}, (Target("GB/s", least=3.0),))
    yield Result("kernel of three heads", {"error": 1.0}, correct=False)
    raise RuntimeError("out of memory")


def test_a_failing_check_is_named_and_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    after = Section("after", 0, lambda session: [Result("reached", {"GB/s": 1.0})])
    monkeypatch.setattr(gpu_check, "all_sections", lambda: [Section("first", 0, found), after])
    out = tmp_path / "found.json"
    assert run(monkeypatch, gpu_check, "--dry", "--out", out) == 1
    error = capsys.readouterr().err
    assert "WRONG: first: kernel of three heads" in error
    assert "WRONG: first: RuntimeError: out of memory" in error
    first, second = json.loads(out.read_text())["sections"]
    assert (first["state"], second["state"]) == ("failed", "done")
    assert [line["verdict"] for line in first["results"]] == ["missed", "WRONG"]


def test_a_missed_target_alone_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Result("rate", {"GB/s": float("nan")}, (Target("GB/s", least=3.0),))
    monkeypatch.setattr(gpu_check, "all_sections", lambda: [Section("only", 0, lambda session: [slow])])
    assert slow.verdict == "missed"
    assert run(monkeypatch, gpu_check, "--dry") == 0


def test_kernels_that_are_wrong_or_break_fail_their_checks(session: Session) -> None:
    def nothing(q: jax.Array, *args: Any, **options: Any) -> jax.Array:
        return jax.numpy.zeros_like(q)

    def broken(*args: Any) -> jax.Array:
        raise NotImplementedError("no such instruction")

    session.attention, session.packed_matmul = nothing, broken
    session.lora_matmul = lambda x, weights, *_: jax.numpy.full((x.shape[0], sum(weights.parts)), jax.numpy.nan)
    results = list(kernels_are_right(session))
    assert {result.correct for result in results} == {False}
    assert any(result.note == "NotImplementedError: no such instruction" for result in results)


def test_without_a_gpu_only_dry_runs_are_allowed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(platform="cpu", device_kind="cpu")])
    for tool in (gpu_check, tune_kernels):
        with pytest.raises(SystemExit, match="2"):
            run(monkeypatch, tool)
        assert "--dry does without" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "name"),
    [("NVIDIA H200", "H200 SXM"), ("NVIDIA A100-SXM4-80GB", "A100 80GB SXM"), ("NVIDIA L40", "NVIDIA L40")],
)
def test_chips_are_known_by_whole_words(kind: str, name: str) -> None:
    assert chip_of(kind).name == name


@pytest.mark.parametrize(("capability", "reason"), [(90, None), (80, "it is made for compute capability 9.0")])
def test_mosaic_is_measured_only_on_hopper(
    monkeypatch: pytest.MonkeyPatch, capability: int, reason: str | None
) -> None:
    monkeypatch.setattr(tuning, "target", lambda: tuning.Target("NVIDIA X", capability))
    session = open_session(60, dry=False)
    assert (session.mosaic is None) == (reason is not None)
    assert (session.no_mosaic or "").startswith(reason or "")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
def test_kernels_are_right_on_this_gpu() -> None:
    wrong = [result for result in kernels_are_right(open_session(600, dry=False)) if not result.correct]
    assert wrong == []
