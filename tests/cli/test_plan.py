"""``jaxserve plan``: figures worked out by hand, answers of no, and wrong calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.cli import main

LLAMA_70B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
PARAMETERS = 80 * (8192 * (8192 + 2 * 1024) + 8192 * 8192 + 3 * 8192 * 28672 + 2 * 8192) + 2 * 128256 * 8192 + 8192
KIB, GIB = 1 << 10, 1 << 30


@pytest.fixture(autouse=True)
def default_share_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_70B))
    return path


def planned(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any]]:
    code = main(["plan", "--json", *argv])
    record = json.loads(capsys.readouterr().out)
    assert record["fits"] == (code == 0)
    return code, record


def test_a_70b_model_by_hand(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """320 KiB a token, 2.5 GiB a session of 8192 tokens, 80 GiB for 32 of them."""
    code, record = planned(
        capsys, str(llama.parent), "--gpu", "400G", "--sessions", "32", "--context", "8K", "--max-num-seqs", "32"
    )
    memory, (mix,) = record["memory"], record["sessions"]
    assert code == 0
    assert memory["weights"] == {"bfloat16": 2 * PARAMETERS}
    assert memory["token_bytes"] == 320 * KIB
    assert mix["kv_bytes"] == 2.5 * GIB
    assert record["wanted"] * mix["kv_bytes"] == 80 * GIB
    assert memory["kv"]["block_bytes"] == 16 * 320 * KIB
    room = int(300 * GIB * 0.9) - 2 * PARAMETERS
    assert memory["kv_room"] == room
    blocks = room // (16 * 320 * KIB)
    assert memory["kv"]["num_blocks"] == blocks
    assert mix["paged"] == {"tokens": 8192, "wasted": 0.0, "sessions": (blocks - 1) // 512}
    assert mix["contiguous"]["sessions"] == (blocks - 1) // 8192 == 3
    assert mix["contiguous"]["wasted"] == 1 - 8192 / 131072
    assert memory["max_model_len"] == memory["largest_max_model_len"] == 131072
    assert memory["memory"]["limit"] == 300 * GIB
    assert record["bounds"] is None


def test_weights_that_do_not_fit_are_told_with_what_would(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, record = planned(capsys, str(llama), "--gpu", "h200")
    limit = int(int(141e9 * 0.75) * 0.9)
    int8, *others = record["alternatives"]
    assert code == 1
    assert record["memory"]["kv"] is None
    assert "the weights do not fit: they take 131.4" in record["problems"][0]
    assert int8["what"] == "--quantization int8"
    assert int8["fits"] == (int8["num_bytes"] < limit)
    assert 0.5 < int8["num_bytes"] / (2 * PARAMETERS) < 0.55
    assert [other["what"][:14] for other in others] == ["2 such devices"]
    assert main(["plan", str(llama), "--gpu", "h200"]) == 1
    text = capsys.readouterr().out
    assert "131.4" in text
    assert "320.00 KiB of KV per token" in text
    assert "NO: the weights do not fit" in text
    assert "fits: --quantization int8" in text
    code, record = planned(capsys, str(llama), "--gpu", "h200", "--quantization", "int8", "--context", "3000", "5000")
    assert code == 0
    assert list(record["memory"]["weights"]) == ["int8", "bfloat16"]
    assert [mix["contexts"] for mix in record["sessions"]] == [[3000], [5000], [3000, 5000]]
    assert [bound["context"] for bound in record["bounds"]["decodes"]] == [3000, 5000, 4000]


def test_the_least_time_of_a_step_by_hand(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights but the table that is looked up, 4 caches of 8192 tokens, and the 4 that are written."""
    argv = ("--gpu", "h200", "--quantization", "int8", "--sessions", "4", "--context", "8192")
    _, record = planned(capsys, str(llama), *argv)
    (bound,) = record["bounds"]["decodes"]
    weights = sum(record["memory"]["weights"].values()) - 2 * 128256 * 8192
    seconds = (weights + 4 * 8193 * 320 * KIB) / 4.8e12
    assert bound["seconds"] == pytest.approx(seconds)
    assert bound["tokens_per_second"] == pytest.approx(4 / seconds)
    assert bound["is_memory_bound"]
    _, record = planned(capsys, str(llama), *argv, "--speculative-model", "[ngram]", "--spec-tokens", "3")
    (guessing,) = record["bounds"]["decodes"]
    assert guessing["seconds"] == bound["seconds"]
    assert guessing["tokens_per_second"] == pytest.approx(4 * bound["tokens_per_second"], rel=1e-3)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--sessions", "9", "--context", "100000"), "9 sessions of 100000 tokens do not fit at once"),
        (("--kv-cache-memory-bytes", "400G"), "it does not fit"),
        (("--gpu", "1"), "the weights do not fit"),
        (("--max-model-len", "131072", "--num-gpu-blocks-override", "9"), "does not fit: the KV cache of 9 blocks"),
        (("--kv-cache-memory-bytes", "1M"), "no room for KV blocks"),
        (("--enable-lora", "--max-loras", "1024", "--max-lora-rank", "512"), "weights and adapters do not fit"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_an_answer(
    llama: Path, argv: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, record = planned(capsys, str(llama), "--gpu", "200G", "--quantization", "int8", *argv)
    assert code == 1
    assert words in " ".join(record["problems"])


def test_flags_are_suggested(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--gpu", "h200", "--quantization", "int8", "--sessions", "4", "--context", "6000"]
    _, record = planned(capsys, str(llama), *argv)
    flags = [suggestion["flag"] for suggestion in record["suggestions"]]
    assert flags == ["XLA_PYTHON_CLIENT_MEM_FRACTION=0.95", "--max-model-len 6144", "--max-num-seqs 4"]
    _, record = planned(capsys, str(llama), *argv, "--gpu-memory-utilization", "1.0")
    (share,) = (each["flag"] for each in record["suggestions"] if "utilization" in each["flag"])
    _, record = planned(capsys, str(llama), *argv, *share.split())
    assert record["memory"]["left"] >= record["memory"]["workspace"]["num_bytes"]
    _, record = planned(capsys, str(llama), *argv[:4], "--max-model-len", "100K", "--num-gpu-blocks-override", "101")
    assert "--max-model-len 1600" in [suggestion["flag"] for suggestion in record["suggestions"]]


def test_wrong_calls_end_with_code_two_and_the_field(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for argv, words in (
        (
            ["--gpu", "h300"],
            "--gpu must be one of h100, h200, a100, l4, cpu, or bytes of memory such as 48G, got 'h300'",
        ),
        (["--gpu", "0"], "--gpu must be one of"),
        (["--sessions", "0"], "--sessions must be an integer from 1"),
        (["--context", "0"], "--context must be integers of at least 1, got 0"),
        (["--context", "200K"], "--context 204800 is more than the model's longest context (131072 tokens)"),
        (["--context", "5000", "--max-model-len", "4K"], "--context 5000 is more than max_model_len (4096 tokens)"),
        (["--max-model-len", "200K"], "--max-model-len 204800 is more than the model's longest context"),
        (["--quantization", "gguf"], "--quantization gguf keeps the blocks of a quantised GGUF file"),
        (["--max-loras", "3"], "--max-loras has no effect without --enable-lora"),
        (["--spec-tokens", "3"], "--spec-tokens needs a method"),
        (["--speculative-model", "no/such/folder/here"], "--speculative-model: There is no model"),
        (["--spec-method", "eagle", "--spec-model", "some/heads"], "the heads some/heads are not on this machine"),
        (["--activation-quantization", "int8", "--gpu", "l4"], "--activation-quantization int8 is made for the CPU"),
    ):
        assert main(["plan", str(llama), *argv]) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1


def test_settings_that_are_wrong_are_told_by_their_key(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for changes, words in (
        ({"num_key_value_heads": 7}, "num_attention_heads must be a multiple of num_key_value_heads (7)"),
        ({"hidden_size": "big"}, "hidden_size"),
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture (GPT2LMHeadModel) is not served"),
    ):
        llama.write_text(json.dumps({**LLAMA_70B, **changes}))
        assert main(["plan", str(llama)]) == 1
        assert words in capsys.readouterr().err
    llama.write_text("{")
    assert main(["plan", str(llama)]) == 1
    assert f"{llama} is not valid JSON" in capsys.readouterr().err
    llama.write_text('{"a":' * 100_000)
    assert main(["plan", str(llama)]) == 1
    assert f"{llama} is nested too deeply" in capsys.readouterr().err
    assert main(["plan", str(tmp_path / "nowhere")]) == 1
    assert "There is no model" in capsys.readouterr().err
