"""``jaxserve bench serve`` against the live server of the real model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxserve.cli import main


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_every_request_is_answered_with_the_tokens_asked_for(server: str, endpoint: str, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    argv = ["--num-prompts", "6", "--input-len", "24", "--output-len", "8", "--ignore-eos", "--request-rate", "20"]
    code = main(["bench", "serve", "--base-url", server, "--endpoint", endpoint, *argv, "--result-filename", str(file)])
    assert code == 0
    saved = json.loads(file.read_text())
    assert (saved["model_id"], saved["completed"], saved["failed"]) == ("smollm2-135m", 6, 0)
    assert saved["total_output_tokens"] == 48
    assert saved["total_input_tokens"] >= 6 * 24
    assert (saved["total_input_tokens"] == 6 * 24) == (endpoint == "/v1/completions")
    assert 0 < saved["p50_ttft_ms"] < 1e3 * saved["duration"]
    assert saved["p50_tpot_ms"] > 0
