"""How much of the machine others used, and reports."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxserve.bench import machine
from jaxserve.bench.machine import CpuMeter, foreign_text, write_report
from jaxserve.errors import JaxserveError

BUSY = "import time\nend = time.perf_counter() + 0.6\nwhile time.perf_counter() < end: pass"


@pytest.mark.parametrize(("own", "foreign"), [(30.0, 0.25), (90.0, 0.0)])
def test_others_used_what_was_busy_and_not_our_own(monkeypatch: pytest.MonkeyPatch, own: float, foreign: float) -> None:
    # Two clocks that tick apart may say that this process did more than all together.
    readings = iter([(10.0, 5.0, 1.0), (210.0, 85.0, 1.0 + own)])
    monkeypatch.setattr(CpuMeter, "_read", staticmethod(lambda: next(readings)))
    with CpuMeter() as meter:
        pass
    assert meter.foreign == foreign


def test_the_work_of_a_child_counts_as_own_work() -> None:
    before, started = CpuMeter._read(), time.perf_counter()
    subprocess.run([sys.executable, "-c", BUSY], check=True)
    after = CpuMeter._read()
    if before is None or after is None:
        pytest.skip("only Linux tells")
    assert 0.1 < after[2] - before[2] <= 2 * (time.perf_counter() - started)
    assert after[1] - before[1] > 0.1


def test_a_system_that_does_not_tell_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "_STAT", tmp_path / "none")
    with CpuMeter() as meter:
        pass
    assert meter.foreign is None
    assert "cannot be measured" in foreign_text(meter.foreign)


def test_a_report_holds_its_circumstances(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_report(tmp_path / "r.json", {"figure": 3})
    saved = json.loads((tmp_path / "r.json").read_text())
    assert saved["figure"] == 3
    assert saved["versions"]["jaxserve"]
    assert saved["machine"]["memory_gib"] > 0
    assert capsys.readouterr().out == f"Written to {tmp_path}/r.json\n"
    with pytest.raises(JaxserveError, match=r"cannot write .*/none/r.json: No such file"):
        write_report(tmp_path / "none" / "r.json", {})
