"""``jaxserve bench throughput``, ``latency`` and ``startup``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.bench import startup
from jaxserve.bench.startup import Start, measure_startup
from jaxserve.cli import main
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError, JaxserveError

TINY = ("tiny", "--block-size", "8")


def test_throughput_counts_what_was_generated(
    started: list[EngineConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    argv = ("--num-prompts", "5", "--input-len", "12", "--output-len", "6", "--result-filename", str(file))
    assert main(["bench", "throughput", *TINY, *argv, "--seed", "3"]) == 0
    saved = json.loads(file.read_text())
    assert (saved["num_requests"], saved["total_input_tokens"], saved["total_output_tokens"]) == (5, 60, 30)
    assert saved["tokens_per_second"] == pytest.approx(3 * saved["output_tokens_per_second"])
    assert saved["requests_per_second"] == pytest.approx(5 / saved["elapsed_time"])
    assert saved["machine"]["cores"]
    assert f"{saved['requests_per_second']:.2f} requests/s" in capsys.readouterr().out
    assert [config.model.seed for config in started] == [3]


def test_throughput_of_random_tokens(started: list[EngineConfig], capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--dataset-name", "random", "--random-input-len", "20", "--random-output-len", "4", "--num-prompts", "3")
    assert main(["bench", "throughput", *TINY, *argv]) == 0
    assert "Total num prompt tokens:  60\nTotal num output tokens:  12\n" in capsys.readouterr().out


def test_latency_is_that_of_a_whole_batch(started: list[EngineConfig], tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    argv = [
        "--input-len",
        "10",
        "--output-len",
        "5",
        "--batch-size",
        "2",
        "--num-iters",
        "3",
        "--num-iters-warmup",
        "1",
    ]
    assert main(["bench", "latency", *TINY, *argv, "--result-filename", str(file)]) == 0
    saved = json.loads(file.read_text())
    assert len(saved["latencies"]) == 3
    assert min(saved["latencies"]) <= saved["percentiles"]["50"] <= max(saved["latencies"])
    assert saved["avg_latency"] == pytest.approx(sum(saved["latencies"]) / 3)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["latency", "--input-len", "90", "--output-len", "20"], "are more than the 96 tokens of a context"),
        (["latency", "--input-len", "9000000"], "--input-len must be at most"),
        (["latency", "--batch-size", "0"], "--batch-size must be at least 1"),
        (["latency", "--num-iters-warmup", "-1"], "--num-iters-warmup must be at least 0"),
        (["throughput", "--dataset-name", "trace", "--dataset-path", "x"], "see 'jaxserve bench serve'"),
        (["startup", "--num-warm", "0"], "--num-warm must be at least 1"),
        (["startup", "--compilation-cache-dir", "/x"], "--compilation-cache-dir must be left out"),
        (["claims", "--output", "claims.png"], "--output must be a file that ends in .svg"),
        (["claims", "--repeats", "0"], "--repeats must be at least 1"),
        (["claims", "--claims", "speed"], "there is no claim 'speed'"),
        (["claims", "--output", "/nowhere/x.svg"], "--output must be a file in a folder that exists"),
        (["claims", "--json", "/nowhere/x.json"], "--json must be a file in a folder that exists"),
        (["claims", "--max-model-len", "100"], "--max-model-len is 100"),
    ],
)
def test_wrong_calls_end_with_code_two(
    argv: list[str], words: str, started: list[EngineConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *argv[:1], *TINY, *argv[1:]]) == 2
    assert words in capsys.readouterr().err


def test_warm_starts_find_the_caches_that_the_cold_one_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found: list[bool] = []

    def start(settings: dict[str, Any]) -> Start:
        assert settings["weight_cache_dir"] == "off"
        cache = Path(settings["compilation_cache_dir"])
        found.append(cache.exists())
        cache.mkdir(exist_ok=True)
        return Start({"compile": 9.0 - 2 * len(found), "total": 10.0}, 0.0)

    monkeypatch.setattr(startup, "_start_elsewhere", start)
    result = measure_startup(EngineConfig.from_flat({"weight_cache_dir": "off"}), 3)
    assert found == [False, True, True, True]
    assert {kind: [s.figures["compile"] for s in starts] for kind, starts in result.items()} == {
        "cold": [7.0],
        "warm": [5.0, 3.0, 1.0],
    }
    startup.show(result)
    out = capsys.readouterr().out
    assert "warm (of 3)" in out
    assert "7.00" in out
    assert "3.00" in out
    with pytest.raises(ConfigError, match="--weight-cache-dir must be left out"):
        measure_startup(EngineConfig.from_flat({"weight_cache_dir": "/x"}), 1)


def test_a_start_is_timed_by_phase(started: list[EngineConfig]) -> None:
    figures = startup._start_here(EngineConfig.from_flat({"model": "tiny", "block_size": 8}).flat())
    assert set(figures) == {"imports", "first token", "peak MiB"}
    assert figures["first token"] > 0
    assert figures["peak MiB"] > 50


def test_a_start_that_fails_is_told_with_its_last_words() -> None:
    with pytest.raises(JaxserveError, match=r"did not start \(exit code 1\): There is no model '/nowhere'"):
        measure_startup(EngineConfig.from_flat({"model": "/nowhere"}), 1)
