"""The subcommands, and how they end."""

from __future__ import annotations

import itertools
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from jaxserve import __version__
from jaxserve.cli import collect_env, main
from jaxserve.config import ServerConfig
from jaxserve.errors import LoadError
from jaxserve.server import bind, create_app
from tests.cli.conftest import Loader
from tests.server.fake import SCRIPT, FakeEngine


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ServerConfig, socket.socket]]:
    """What ``serve`` handed over to the server."""
    calls: list[tuple[Any, ServerConfig, socket.socket]] = []
    monkeypatch.setattr("jaxserve.server.run_server", lambda *call: calls.append(call))
    return calls


@pytest.fixture
def url() -> Iterator[str]:
    """A running server of a fake engine, with a key."""
    config = ServerConfig(port=0, api_key=("key",))
    with bind(config) as sock:
        app = create_app(FakeEngine(), config)
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", ws="none"))
        thread = threading.Thread(target=server.run, args=([sock],))
        thread.start()
        while not server.started:
            time.sleep(0.005)
        yield "http://{}:{}".format(*sock.getsockname())
        server.should_exit = True
        thread.join()


def fails(argv: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The command ends with ``code`` and one line that holds ``words``."""
    with pytest.raises(SystemExit) as exit:
        sys.exit(main(argv))
    assert exit.value.code == code
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_serve_passes_the_flags_on(loader: Loader, served: list[Any]) -> None:
    argv = "serve some/model --max-model-len 2K --no-warmup --block-size 32 --port 0 --api-key a b --log-level error"
    assert main(argv.split()) == 0
    config = loader.config
    assert config is not None
    assert (config.model.model, config.model.max_model_len) == ("some/model", 2048)
    assert (config.runner.warmup, config.cache.block_size) == (False, 32)
    ((engine, server, sock),) = served
    assert engine is loader.engine
    assert (server.port, server.api_key) == (0, ("a", "b"))
    assert sock.fileno() == -1, "the socket is closed in the end"


def test_serve_reads_the_file_and_the_command_line_wins(loader: Loader, served: list[Any], tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: from/file\nport: 0\nblock-size: 8\nserved_model_name: [x, y]\nseed: 5\n")
    assert main(["serve", "--config", str(file), "--block-size", "64"]) == 0
    assert loader.config is not None
    assert (loader.config.model.model, loader.config.cache.block_size, loader.config.model.seed) == ("from/file", 64, 5)
    assert served[0][1].served_model_name == ("x", "y")


def test_wrong_calls_end_with_code_two(capsys: pytest.CaptureFixture[str], tmp_path: Path, loader: Loader) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("modle: x\n")
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("block-size: '16'\n")
    for argv, words in (
        (["serve", "--blok-size", "3"], "unknown flag --blok-size. Did you mean '--block-size'?"),
        (["serve", "--config", str(file)], "unknown setting 'modle'. Did you mean 'model'?"),
        (["serve", "--config", "nowhere.yaml"], "cannot read nowhere.yaml"),
        (["serve", "--port", "70000"], "--port must be an integer from 0 to 65535"),
        (["serve", "--shutdown-timeout", "nan"], "--shutdown-timeout must be"),
        (["serve", "--gpu-memory-utilization", "2"], "--gpu-memory-utilization must be in (0, 1]"),
        (["serve", "--max-num-seqs", "0"], "--max-num-seqs must be an integer from 1 to 65536"),
        (["complete", "--prompt", "x", "--temperature", "-1"], "--temperature must be in [0, 100]"),
        (["serve", "--max-num-batched-tokens", "1T"], "--max-num-batched-tokens must be an integer from 1 to 1048576"),
        (["serve", "--seed", str(2**64)], "--seed must be an integer from"),
        (["serve", "--chat-template", ""], "--chat-template must not be empty"),
        (["serve", "--api-key", ""], "--api-key must not hold an empty string"),
        (["serve", "--config", ""], "cannot read"),
        (["serve", "--config", str(wrong)], f"{wrong}: block_size must be of type int, got '16'"),
        (["complete"], "--prompt"),
        (["complete", "--prompt", "x", "--api-key", "k"], "--api-key needs --url"),
        (
            ["chat", "--url", "http://127.0.0.1:1", "--block-size", "8"],
            "--block-size has no effect together with --url",
        ),
        (["dance"], "invalid choice: 'dance'"),
        ([], "COMMAND"),
    ):
        fails(argv, 2, words, capsys)
    assert loader.config is None


def test_what_a_server_lacks_is_found_before_loading(loader: Loader, capsys: pytest.CaptureFixture[str]) -> None:
    for argv, words in (
        (["--api-key-file", "nowhere"], "--api-key-file 'nowhere' cannot be read: No such file"),
        (["--ssl-certfile", "nowhere"], "--ssl-certfile and ssl_keyfile cannot be used"),
    ):
        fails(["serve", "--port", "0", *argv], 2, words, capsys)
    assert loader.config is None


def test_run_batch(loader: Loader, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "model": "ours"}
    request = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    source.write_text(json.dumps(request) + "\n", encoding="utf-8")
    argv = ["run-batch", "some/model", "-i", str(source), "-o", str(target), "--served-model-name", "ours"]
    assert main([*argv, "--block-size", "32"]) == 0
    assert loader.config is not None
    assert (loader.config.model.model, loader.config.cache.block_size) == ("some/model", 32)
    assert json.loads(target.read_text())["response"]["body"]["choices"][0]["message"]["content"] == "Hello"
    assert capsys.readouterr().out == f"1 answered, 0 of them failed: {target}\n"
    assert loader.engine.shutdowns == [0.0]
    loader.engine.dead = None
    source.write_text(source.read_text() + "{\n", encoding="utf-8")
    assert main(argv) == 1
    fails(["run-batch", "-i", "nowhere", "-o", str(target)], 2, "--input-file 'nowhere' is no file", capsys)
    fails(["run-batch", "-i", str(source), "-o", "no/where"], 2, "--output-file 'no/where' is in no folder", capsys)
    fails([*argv, "--port", "1"], 2, "unknown flag --port", capsys)


def test_collect_env(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_foo")
    monkeypatch.setattr(collect_env, "_DEVICES", "raise RuntimeError('no driver')")
    assert main(["collect-env"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["versions"]["jax"]
    assert shown["machine"]["cores"]
    assert shown["jax"] == {"error": "jax has failed (code 1): RuntimeError: no driver"}
    assert (shown["environment"]["HF_TOKEN"], shown["environment"]["XLA_FLAGS"]) == ("***", "--xla_cpu_foo")


def test_load_errors_end_with_code_one(loader: Loader, capsys: pytest.CaptureFixture[str]) -> None:
    loader.error = LoadError("no such\nfolder")
    fails(["serve", "--port", "0"], 1, "jaxserve: error: no such folder\n", capsys)


def test_taken_port_is_found_before_loading(loader: Loader, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        fails(["serve", "--port", port], 1, f"cannot listen on 127.0.0.1:{port}: Address already in use", capsys)
    assert loader.config is None


def test_complete_with_a_model_of_its_own(loader: Loader, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complete", "m", "--prompt", "x", "--max-tokens", "5", "--seed", "7", "--stop", "a", "b"]) == 0
    assert capsys.readouterr().out == "Hello\n"
    params = loader.engine.submitted[0]["params"]
    assert (params.max_tokens, params.seed, params.stop) == (5, 7, ("a", "b"))
    assert loader.engine.shutdowns == [0.0]


def test_complete_asks_a_server(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    for form in (url, f"{url}/v1/"):
        assert main(["complete", "--prompt", "x", "--max-tokens", "11", "--url", form, "--api-key", "key"]) == 0
        assert capsys.readouterr().out == "Hello wörl\n"
    argv = ["complete", "other", "--prompt", "x", "--url", url, "--api-key", "key"]
    fails(argv, 1, "refuses (404): the model 'other' does not exist", capsys)
    fails(["complete", "--prompt", "x", "--url", url], 1, "refuses (401)", capsys)
    fails(["complete", "--prompt", "x", "--url", "http://127.0.0.1:1"], 1, "no answer from http://127.0.0.1:1", capsys)
    fails(["complete", "--prompt", "x", "--url", "127.0.0.1:1"], 1, "'http://' or 'https://' protocol.\n", capsys)


def chat(monkeypatch: pytest.MonkeyPatch, lines: list[str], *argv: str) -> int:
    """Run the chat as if ``lines`` were typed, then ctrl-D."""
    typed = iter(lines)

    def type_line(prompt: str) -> str:
        for line in typed:
            return line
        raise EOFError

    monkeypatch.setattr("builtins.input", type_line)
    return main(["chat", *argv])


def test_chat_remembers_the_conversation(
    loader: Loader, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(monkeypatch, ["hi", "", "more", "/exit", "no"], "--max-tokens", "5", "--system-prompt", "rule") == 0
    assert capsys.readouterr().out == "Hello\nHello\n"
    prompts = [bytes(s["ids"]).decode() for s in loader.engine.submitted]
    assert prompts == [
        "<system>rule</><user>hi</><assistant>",
        "<system>rule</><user>hi</><assistant>Hello</><user>more</><assistant>",
    ]
    assert loader.engine.shutdowns == [0.0]


def test_chat_asks_a_server(url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat(monkeypatch, ["hi", "more"], "--url", url, "--api-key", "key", "--stop", "time") == 0
    text = SCRIPT[: SCRIPT.index("time")]
    assert capsys.readouterr().out == f"{text}\n{text}\n\n"


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C has its effect, although shells let what they start in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_stops_the_answer_and_not_the_chat(
    loader: Loader, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = itertools.count(1)
    advance = loader.engine._advance

    def interrupted(completion: Any) -> Any:
        if next(steps) == 20:
            signal.raise_signal(signal.SIGINT)
        return advance(completion)

    monkeypatch.setattr(loader.engine, "_advance", interrupted)
    assert chat(monkeypatch, ["hi", "more"], "--max-tokens", "200") == 0
    assert " [stopped]\n" in capsys.readouterr().out
    assert (loader.engine.aborted, loader.engine.finished) == (1, 1)
    stopped = bytes(loader.engine.submitted[1]["ids"]).decode()
    assert stopped.startswith("<user>hi</><assistant>Hello")


def test_refused_line_is_forgotten(
    loader: Loader, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(monkeypatch, ["x" * 600, "hi"], "--max-tokens", "5") == 0
    assert capsys.readouterr().out.startswith("error: This model's maximum context length")
    assert bytes(loader.engine.submitted[0]["ids"]).decode() == "<user>hi</><assistant>"


@pytest.mark.parametrize("argument", ["--version", "--help"])
def test_quick_answers_import_nothing_heavy(argument: str) -> None:
    script = (
        "import sys\nfrom jaxserve.cli import main\n"
        f"try:\n    main([{argument!r}])\nexcept SystemExit:\n    pass\n"
        "heavy = {'jax', 'numpy', 'transformers', 'starlette', 'httpx', 'pydantic'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert (__version__ if argument == "--version" else "serve") in done.stdout
