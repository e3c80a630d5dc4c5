"""``tools/roofline.py`` as a command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import roofline


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> None:
    monkeypatch.setattr("sys.argv", ["roofline.py", *args])
    roofline.main()


def test_table_of_all_chips(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, "--chip", "all", "--batch", "32", "--kernels")
    out = capsys.readouterr().out
    assert "14.96 GiB of weights, 128.0 KiB of KV per token" in out
    assert "decode attention" in out
    for chip in ("H100", "H200", "A100", "L4", "EPYC"):
        assert chip in out


def test_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, "--model", "smollm2-135m", "--batch", "1,8", "--context", "100,200", "--weights", "int8", "--json")
    records = json.loads(capsys.readouterr().out)
    assert [(r["step"]["decodes"], r["step"]["context"]) for r in records] == [(1, 100), (1, 200), (8, 100), (8, 200)]
    assert all(r["fits"] and r["precision"]["weights"] == "int8" for r in records)
    assert all(0 < r["floor"]["seconds"] <= r["kernel_by_kernel"]["seconds"] for r in records)


def test_a_config_of_hugging_face(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    run(monkeypatch, "--model", str(tmp_path), "--json")
    ours = json.loads(capsys.readouterr().out)
    run(monkeypatch, "--model", "smollm2-135m", "--json")
    assert ours == json.loads(capsys.readouterr().out)


def test_unknown_dtype_is_a_usage_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, "--weights", "int3")
    assert "weights are one of" in capsys.readouterr().err
