"""Requests from text, random tokens and files; what a file may not hold; when they are sent."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.bench.datasets import Sample, make_samples
from jaxserve.bench.load import arrival_times
from jaxserve.bench.options import DatasetOptions, ServeOptions
from jaxserve.errors import ConfigError
from tests.tokenizer.samples import byte_level_metadata, made_from

TOKENIZER, _ = made_from(byte_level_metadata("gpt-2"))


def samples(seed: int = 1, **options: Any) -> list[Sample]:
    return make_samples(DatasetOptions(**options), TOKENIZER, seed)


def ids(sample: Sample) -> tuple[int, ...]:
    assert isinstance(sample.prompt, tuple)
    return sample.prompt


def lines(path: Path, *entries: Any) -> str:
    path.write_text("\n".join(entry if isinstance(entry, str) else json.dumps(entry) for entry in entries) + "\n")
    return str(path)


def test_text_has_lengths_of_its_own_or_those_asked_for() -> None:
    made = samples(num_prompts=100)
    assert made == samples(num_prompts=100)
    assert len(made) == 100
    assert len({sample.num_prompt for sample in made}) > 20
    other = samples(seed=2, num_prompts=100)
    assert [(s.num_prompt, s.max_tokens) for s in other] == [(s.num_prompt, s.max_tokens) for s in made]
    assert other[0].prompt != made[0].prompt
    fixed = samples(num_prompts=2, input_len=30, output_len=7)
    assert [(len(ids(s)), s.num_prompt, s.max_tokens) for s in fixed] == [(30, 30, 7)] * 2
    assert fixed[0].text == TOKENIZER.decode(ids(fixed[0]))


def test_a_prompt_longer_than_the_text_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^input_len must be at most \d+, got 10000000"):
        samples(input_len=10_000_000)


def test_random_tokens_are_ordinary_and_lengths_lie_within_the_range() -> None:
    made = samples(dataset_name="random", random_input_len=40, random_output_len=10, random_range_ratio=0.5)
    assert made == samples(dataset_name="random", random_input_len=40, random_output_len=10, random_range_ratio=0.5)
    assert len(made) == 64
    assert {len(ids(sample)) for sample in made} <= set(range(20, 61))
    assert min(sample.num_prompt for sample in made) < 30 < 50 < max(sample.num_prompt for sample in made)
    assert {sample.max_tokens for sample in made} <= set(range(5, 16))
    assert not TOKENIZER.special_ids & {token for sample in made for token in ids(sample)}
    exact = samples(dataset_name="random", num_prompts=3, random_input_len=40)
    assert [(sample.num_prompt, sample.max_tokens) for sample in exact] == [(40, 128)] * 3


def turns(question: Any, answer: Any) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}


@pytest.mark.parametrize("array", [False, True])
def test_conversations_give_their_first_question_and_the_length_of_its_answer(tmp_path: Path, array: bool) -> None:
    path = tmp_path / "talk.json"
    entries = [turns("Hi", "four"), turns("Why?", "x" * 9), turns("So", "yes")]
    text = json.dumps(entries) if array else "\n\n".join(map(json.dumps, entries))
    path.write_text(text)
    made = samples(dataset_name="sharegpt", dataset_path=str(path))
    assert {(s.prompt, s.text, s.max_tokens) for s in made} == {("Hi", "Hi", 4), ("Why?", "Why?", 9), ("So", "So", 3)}
    assert {s.max_tokens for s in samples(dataset_name="sharegpt", dataset_path=str(path), output_len=5)} == {5}
    assert len(samples(dataset_name="sharegpt", dataset_path=str(path), num_prompts=2)) == 2


def test_a_trace_keeps_its_times_and_lengths_and_shares_what_its_hashes_share(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "trace.jsonl",
        {"timestamp": 3000, "input_length": 700, "output_length": 2, "hash_ids": [4, 6]},
        {"timestamp": 1000, "input_length": 600, "output_length": 3, "hash_ids": [4, 5]},
        {"timestamp": 1500.5, "input_length": 40, "output_length": 1},
    )
    made = samples(dataset_name="trace", dataset_path=path)
    assert [(s.at, s.num_prompt, s.max_tokens) for s in made] == [(0.0, 600, 3), (0.5005, 40, 1), (2.0, 700, 2)]
    assert ids(made[0])[:512] == ids(made[2])[:512]
    assert ids(made[0])[512:] != ids(made[2])[512:600]
    quick = samples(dataset_name="trace", dataset_path=path, trace_speedup=4.0, num_prompts=3)
    assert [s.at for s in quick] == pytest.approx([0.0, 0.125125, 0.5])


GOOD = {"timestamp": 0, "input_length": 5, "output_length": 5}


@pytest.mark.parametrize(
    ("dataset", "bad", "message"),
    [
        ("trace", "{", "line 2 is not valid JSON"),
        ("trace", [], "line 2 must be an object, got list"),
        ("trace", GOOD | {"timestamp": -1}, "line 2: timestamp must be a number of milliseconds from 0, got -1"),
        ("trace", GOOD | {"timestamp": "now"}, "line 2: timestamp"),
        ("trace", GOOD | {"input_length": 0}, "line 2: input_length must be an integer of at least 1, got 0"),
        ("trace", {"timestamp": 0, "input_length": 5}, "line 2: output_length must be an integer .* got None"),
        (
            "trace",
            GOOD | {"input_length": 10**12},
            r"file\.jsonl, line 2: input_length must be at most \d+, got 10{12}:",
        ),
        ("trace", GOOD | {"hash_ids": "x"}, "line 2: hash_ids must be a list of integers"),
        ("sharegpt", {}, "line 2 must hold conversations"),
        ("sharegpt", {"conversations": [{"value": "alone"}]}, "line 2 must hold conversations"),
        ("sharegpt", turns("", "x"), "line 2 must hold conversations"),
        ("sharegpt", turns(3, "x"), "line 2 must hold conversations"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, dataset: str, bad: Any, message: str) -> None:
    path = lines(tmp_path / "file.jsonl", GOOD if dataset == "trace" else turns("a", "b"), bad)
    with pytest.raises(ConfigError, match=message):
        samples(dataset_name=dataset, dataset_path=path)


def test_files_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*/none: No such file"):
        samples(dataset_name="trace", dataset_path=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="empty holds no request"):
        samples(dataset_name="trace", dataset_path=lines(tmp_path / "empty", ""))
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="bytes: it is no UTF-8 text"):
        samples(dataset_name="sharegpt", dataset_path=str(tmp_path / "bytes"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset_name": "poems"}, "dataset_name must be one of text, random, sharegpt, trace, got 'poems'"),
        ({"dataset_name": "trace"}, "--dataset-name trace needs --dataset-path"),
        ({"dataset_path": "x"}, "--dataset-path has no effect with --dataset-name text"),
        ({"random_input_len": 5}, "--random-input-len has no effect with --dataset-name text"),
        ({"dataset_name": "random", "output_len": 5}, "--output-len has no effect with --dataset-name random"),
        ({"num_prompts": 0}, "num_prompts must be at least 1, got 0"),
        ({"dataset_name": "random", "random_range_ratio": 1.0}, r"random_range_ratio must be in \[0, 1\)"),
        ({"dataset_name": "trace", "dataset_path": "x", "trace_speedup": math.nan}, "trace_speedup must be greater"),
    ],
)
def test_contradictory_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DatasetOptions(**options)


@pytest.mark.parametrize("options", [{"request_rate": -1.0}, {"burstiness": 0.0}, {"timeout": math.nan}])
def test_negative_rates_and_times_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))} must be greater than 0"):
        ServeOptions(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_arrivals_have_the_rate_and_the_burstiness_asked_for(burstiness: float, variation: float) -> None:
    times = arrival_times(5001, 4.0, burstiness, 7)
    gaps = np.diff(times)
    assert times[0] == 0.0
    assert np.mean(gaps) == pytest.approx(0.25, rel=0.1)
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(variation, rel=0.1)
    assert times == arrival_times(5001, 4.0, burstiness, 7)
    assert times != arrival_times(5001, 4.0, burstiness, 8)


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert arrival_times(3, math.inf, 1.0, 7) == [0.0, 0.0, 0.0]
    assert arrival_times(1, 2.0, 1.0, 7) == [0.0]


def test_separators_within_a_text_end_no_line_of_a_file(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", '{"conversations": [{"value": "a\u2028b"}, {"value": "c\x85d"}]}')
    assert [sample.prompt for sample in samples(dataset_name="sharegpt", dataset_path=path)] == ["a\u2028b"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"timestamp": 1%s, "input_length": 3, "output_length": 3}' % ("0" * 400), "timestamp must be a number"),
        ("[" * 100_000, "is not valid JSON"),
    ],
)
def test_numbers_and_nesting_beyond_measure_are_refused(line: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        samples(dataset_name="trace", dataset_path=lines(tmp_path / "a.jsonl", line))


@pytest.mark.parametrize(
    ("name", "value"),
    [("burstiness", math.inf), ("temperature", math.nan), ("temperature", -1.0), ("seed", -1), ("api_key", "ä")],
)
def test_options_of_a_load_that_cannot_work_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name} must be"):
        ServeOptions(**{name: value})
