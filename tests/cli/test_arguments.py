"""Flags and YAML files derived from dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from jaxserve.cli.arguments import Parser, add_flags, flags_of, parse_size, read_yaml
from jaxserve.errors import ConfigError


@dataclass
class Sample:
    size: int | None = field(default=None, metadata={"help": "100% of it.", "human": True})
    count: int = field(default=3, metadata={"help": "How many.", "choices": (1, 3)})
    ratio: float = field(default=0.5, metadata={"help": "Share."})
    fast_mode: bool = field(default=True, metadata={"help": "Go."})
    names: tuple[str, ...] = field(default=(), metadata={"help": "Some."})


def parse(*argv: str) -> dict[str, Any]:
    parser = Parser(prog="sample")
    add_flags(parser, "samples", flags_of(Sample))
    return vars(parser.parse(argv))


@pytest.mark.parametrize(
    ("text", "value"),
    [("4096", 4096), ("1k", 1000), ("1K", 1024), ("2M", 2 * 2**20), ("4G", 2**32), ("1.5k", 1500), ("2t", 2 * 10**12)],
)
def test_sizes(text: str, value: int) -> None:
    assert parse_size(text) == value


@pytest.mark.parametrize("text", ["", "k", "-1", "1.5", "1kk", "1 k", "nan", "1e3", "9" * 5000, "٤٨G"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(ValueError, match=r"number|integer"):
        parse_size(text)


def test_values_have_the_type_of_their_annotation() -> None:
    argv = ["--size", "2k", "--count", "1", "--ratio", "1", "--no-fast-mode", "--names", "a", "b", "--names", "c"]
    expected = {"size": 2000, "count": 1, "ratio": 1.0, "fast_mode": False, "names": ["a", "b", "c"]}
    assert parse(*argv) == expected
    assert parse() == {}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--ratios", "1"], "unknown flag --ratios. Did you mean '--ratio'?"),
        (["--fast"], "unknown flag --fast."),
        (["--ratio", "x"], "--ratio: 'x' is no float"),
        (["--size", "big"], "--size: 'big' is no integer"),
        (["--count", "2"], "--count: invalid choice: 2"),
        (["stray"], "unknown argument stray."),
    ],
)
def test_errors_are_one_line(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        parse(*argv)
    error = capsys.readouterr().err
    assert exit.value.code == 2
    assert words in error
    assert error.count("\n") == 1


def test_help_shows_groups_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    text = capsys.readouterr().out
    for words in ("samples:", "100% of it.", "(default: 0.5)", "(default: on)", "--no-fast-mode"):
        assert words in text


def test_yaml(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("size: 4K\nfast-mode: false\nratio: 1\nnames: one\n")
    expected = {"size": 4096, "fast_mode": False, "ratio": 1.0, "names": ("one",)}
    assert read_yaml(str(file), flags_of(Sample)) == expected
    file.write_text("size: null\nnames: [a, b]\n")
    assert read_yaml(str(file), flags_of(Sample)) == {"size": None, "names": ("a", "b")}
    file.write_text("")
    assert read_yaml(str(file), flags_of(Sample)) == {}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("rato: 1", "unknown setting 'rato'. Did you mean 'ratio'?"),
        ("fast-mode: true\nfast_mode: true", "set twice"),
        ("count: '3'", "count must be of type int, got '3'"),
        ("count: true", "count must be of type int"),
        ("count: null", "count must be of type int"),
        ("fast_mode: 1", "fast_mode must be of type bool"),
        ("names: [1]", "names must be of type str"),
        ("size: big", "size: 'big' is no integer"),
        ("- a", "must hold names and values"),
        ("a: [", "not valid YAML"),
    ],
)
def test_bad_yaml(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError) as error:
        read_yaml(str(file), flags_of(Sample))
    assert words in str(error.value)
