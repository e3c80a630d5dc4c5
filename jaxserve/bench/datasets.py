"""Requests to send: made from English text, from random tokens, or read from a file.

A file is read whole before anything is sent, and a line that cannot be used is an error that names it.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from jaxserve.bench.options import DatasetOptions
from jaxserve.bench.workloads import Text, corpus, mixed_lengths
from jaxserve.errors import ConfigError

__all__ = ["Sample", "TextCodec", "make_samples"]

_DEFAULT_COUNT = 64
_HASH_BLOCK = 512
"""Tokens that one entry of a trace's ``hash_ids`` stands for."""


class TextCodec(Protocol):
    """What is asked of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], /) -> str: ...


@dataclass(frozen=True, slots=True)
class Sample:
    """One request.

    Attributes:
        prompt: for a completion: token ids, or text where the data set has text.
        text: the same as text, for a chat.
        num_prompt: tokens of the prompt, without what a server adds.
        max_tokens: most tokens of the answer.
        at: seconds from the start at which it is sent; None leaves it to the arrival process.
    """

    prompt: str | tuple[int, ...]
    text: str
    num_prompt: int
    max_tokens: int
    at: float | None = None


def make_samples(options: DatasetOptions, tokenizer: TextCodec, seed: int) -> list[Sample]:
    """The requests of a data set. ConfigError: its file cannot be read, or holds no request."""
    make = {"text": _text, "random": _random, "sharegpt": _sharegpt, "trace": _trace}[options.dataset_name]
    samples = list(make(options, tokenizer, seed))
    if not samples:
        raise ConfigError(f"{options.dataset_path} holds no request.")
    return samples


def _text(options: DatasetOptions, tokenizer: TextCodec, seed: int) -> Iterator[Sample]:
    text = Text(corpus(lambda words: tokenizer.encode(words, add_special_tokens=False)), seed)
    text.require(options.input_len or 0, "input_len")
    for num_prompt, max_tokens in islice(mixed_lengths(), options.num_prompts or _DEFAULT_COUNT):
        ids = text.window(options.input_len or num_prompt)
        yield Sample(ids, tokenizer.decode(ids), len(ids), options.output_len or max_tokens)


def _random(options: DatasetOptions, tokenizer: TextCodec, seed: int) -> Iterator[Sample]:
    source = random.Random(f"random {seed}")
    ordinary = [token for token in range(tokenizer.vocab_size) if token not in tokenizer.special_ids]

    def around(mean: int) -> int:
        spread = options.random_range_ratio
        return max(1, source.randint(round(mean * (1 - spread)), round(mean * (1 + spread))))

    for _ in range(options.num_prompts or _DEFAULT_COUNT):
        ids = tuple(source.choices(ordinary, k=around(options.random_input_len)))
        yield Sample(ids, tokenizer.decode(ids), len(ids), around(options.random_output_len))


def _sharegpt(options: DatasetOptions, tokenizer: TextCodec, seed: int) -> Iterator[Sample]:
    """The first question of each conversation, asking for as many tokens as its first answer has."""
    entries = [(where, _first_turns(where, entry)) for where, entry in _entries(str(options.dataset_path))]
    random.Random(f"sharegpt {seed}").shuffle(entries)
    for _, (question, answer) in entries[: options.num_prompts or _DEFAULT_COUNT]:
        max_tokens = options.output_len or len(tokenizer.encode(answer, add_special_tokens=False))
        yield Sample(question, question, len(tokenizer.encode(question)), max(1, max_tokens))


def _first_turns(where: str, entry: Any) -> tuple[str, str]:
    turns = entry.get("conversations", entry.get("conversation")) if isinstance(entry, dict) else None
    texts = [turn.get("value") for turn in turns[:2] if isinstance(turn, dict)] if isinstance(turns, list) else []
    match texts:
        case [str(question), str(answer)] if question and answer:
            _check_characters(where, question + answer)
            return question, answer
    raise ConfigError(f"{where} must hold conversations: a list whose first two turns have a text as value.")


def _check_characters(where: str, text: str) -> None:
    """JSON can escape half of a surrogate pair, which is no character and cannot be sent."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where} holds a lone surrogate, \\u{ord(text[error.start]):04x}, in its text.") from None


def _trace(options: DatasetOptions, tokenizer: TextCodec, seed: int) -> Iterator[Sample]:
    """Requests of the lengths and at the times of a trace; equal hash ids are equal parts of a prompt."""
    text = Text(corpus(lambda words: tokenizer.encode(words, add_special_tokens=False)), seed)
    lines = [_trace_line(where, entry) for where, entry in _entries(str(options.dataset_path))]
    lines.sort(key=lambda line: line[0])
    for at, where, num_prompt, max_tokens, hash_ids in lines[: options.num_prompts]:
        shared = tuple(token for name in hash_ids for token in text.named(name, _HASH_BLOCK))[:num_prompt]
        longest = len(shared) + text.longest
        if num_prompt > longest:
            raise ConfigError(
                f"{where}: input_length must be at most {longest}, got {num_prompt}: the text ends there."
            )
        ids = shared + (text.window(num_prompt - len(shared)) if num_prompt > len(shared) else ())
        seconds = (at - lines[0][0]) / 1e3 / options.trace_speedup
        yield Sample(ids, tokenizer.decode(ids), len(ids), max_tokens, seconds)


def _trace_line(where: str, entry: Any) -> tuple[float, str, int, int, list[int]]:
    """Milliseconds, where it stands, prompt tokens, new tokens, hash ids."""
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} must be an object, got {type(entry).__name__}.")
    at, hash_ids = entry.get("timestamp"), entry.get("hash_ids", [])
    if isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at <= sys.float_info.max:
        raise ConfigError(f"{where}: timestamp must be a number of milliseconds from 0, got {at!r}.")
    lengths = []
    for name in ("input_length", "output_length"):
        value = entry.get(name)
        if type(value) is not int or value < 1:
            raise ConfigError(f"{where}: {name} must be an integer of at least 1, got {value!r}.")
        lengths.append(value)
    if not isinstance(hash_ids, list) or any(type(name) is not int for name in hash_ids):
        raise ConfigError(f"{where}: hash_ids must be a list of integers, got {hash_ids!r}.")
    return float(at), where, lengths[0], lengths[1], hash_ids


def _entries(path: str) -> Iterator[tuple[str, Any]]:
    """(where, entry) of a JSON array, or of a file with an entry per line."""
    try:
        with open(path, encoding="utf-8") as file:
            content = file.read()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"cannot read {path}: it is no UTF-8 text.") from None
    if content.lstrip().startswith("["):
        for number, entry in enumerate(_parse(path, content), start=1):
            yield f"{path}, entry {number}", entry
        return
    # Not splitlines, which also cuts at separators that JSON's strings may hold.
    for number, line in enumerate(content.split("\n"), start=1):
        if line.strip():
            yield f"{path}, line {number}", _parse(f"{path}, line {number}", line)


def _parse(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not valid JSON: {error}.") from None
