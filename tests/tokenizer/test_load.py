"""Tokenizers from GGUF metadata and from folders encode as the models' own do."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.errors import ConfigError, CorruptFileError, LoadError, MissingFileError, UnsupportedModelError
from jaxserve.tokenizer import load_tokenizer
from tests.tokenizer.samples import (
    TEXTS,
    WORDS,
    byte_level_metadata,
    made_from,
    sentencepiece,
    sentencepiece_metadata,
    smollm2,
    smollm2_metadata,
)

DIGITS = ["1 2", "12 3", "123 4"]


@pytest.fixture(scope="module")
def published() -> Any:
    """SmolLM2's tokenizer put together as its authors publish it: digits one by one, then byte-level BPE."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    metadata = smollm2_metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens[:17]])
    return tokenizer


def test_smollm2_knows_its_special_tokens() -> None:
    tokenizer, _ = smollm2()
    assert tokenizer.vocab_size == 49152
    assert tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.special_ids == frozenset(range(17))
    assert tokenizer.encode("a<|im_end|>b") == [*tokenizer.encode("a"), 2, *tokenizer.encode("b")]
    assert tokenizer.encode("") == []  # it adds no BOS


@given(text=st.text() | st.sampled_from(TEXTS))
def test_smollm2_encodes_as_published(published: Any, text: str) -> None:
    assert smollm2()[0].encode(text) == published.encode(text).ids


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["1", "2", "3", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
        ("llama-bpe", ["123", "4"]),
        ("gpt-2", ["1234"]),
        ("default", ["123", "4"]),
        (None, ["123", "4"]),
    ],
)
def test_pre_tokenisers_cut_digits_each_in_its_way(pre: str | None, pieces: list[str]) -> None:
    tokenizer, _ = made_from(byte_level_metadata(pre, DIGITS, ggml__add_bos_token=False))
    assert [tokenizer.token_text(i) for i in tokenizer.encode("1234")] == pieces


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "'LL", 3),  # contractions in lower case only
        ("llama-bpe", "'LL", 1),
        ("qwen2", "'LL", 1),
        ("gpt-2", "(a", 2),  # a letter takes one sign before it only in the newer patterns
        ("llama-bpe", "(a", 1),
    ],
)
def test_words_are_cut_by_the_models_pattern(pre: str, text: str, pieces: int) -> None:
    merges = ["' L", "'L L", "( a"]
    tokenizer, _ = made_from(byte_level_metadata(pre, merges, ggml__add_bos_token=False))
    assert len(tokenizer.encode(text)) == pieces


def test_llama_bpe_takes_whole_words_over_merges() -> None:
    metadata = byte_level_metadata("llama-bpe", ["a b"], ggml__add_bos_token=False)
    metadata["tokenizer.ggml.tokens"].append("bab")  # a token that no merge makes
    metadata["tokenizer.ggml.token_type"].append(1)
    tokenizer, _ = made_from(metadata)
    assert [tokenizer.token_text(i) for i in tokenizer.encode("bab")] == ["bab"]


def test_qwen2_normalises_text() -> None:
    tokenizer, _ = made_from(byte_level_metadata("qwen2"))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


@pytest.mark.parametrize(
    ("pre", "flag", "has_bos"),
    [("llama-bpe", None, True), ("llama-bpe", False, False), ("gpt-2", None, False), ("gpt-2", True, True)],
)
def test_bos_is_added_as_the_file_says(pre: str, flag: bool | None, has_bos: bool) -> None:
    tokenizer, _ = made_from(byte_level_metadata(pre, ggml__add_bos_token=flag))
    assert (tokenizer.encode("a")[0] == 0) is has_bos
    assert tokenizer.encode("a", add_special_tokens=False)[0] != 0


def test_eos_is_added_where_the_file_says_so() -> None:
    tokenizer, _ = made_from(byte_level_metadata("gpt-2", ggml__add_eos_token=True))
    assert tokenizer.encode("a")[-1] == 1


def test_user_defined_tokens_are_whole_but_stay_in_the_text() -> None:
    tokenizer, _ = made_from(byte_level_metadata("gpt-2"))
    ids = tokenizer.encode("a<tool>b<end>")
    assert ids[1] == 3
    assert ids[3] == 2
    assert tokenizer.decode(ids) == "a<tool>b"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<tool>b<end>"


def test_every_end_token_of_the_file_counts() -> None:
    tokenizer, _ = made_from(byte_level_metadata("gpt-2", ggml__eot_token_id=2))
    assert tokenizer.eos_token_ids == (1, 2)


def sentencepiece_oracle(text: str) -> list[str]:
    """Join the best-scoring neighbours, leftmost first, until none is a token."""
    rank = {word: i for i, word in enumerate(WORDS)}
    parts = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        found = [(rank[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in rank]
        if not found:
            return parts
        _, i = min(found)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@given(text=st.text("abcdehlorw ", max_size=30) | st.lists(st.sampled_from(["hello", "world"])).map(" ".join))
def test_sentencepiece_joins_by_score(text: str) -> None:
    tokenizer, _ = sentencepiece()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert [WORDS[i - 259] for i in ids] == sentencepiece_oracle(text)
    assert tokenizer.decode(ids) == text


def test_sentencepiece_adds_bos_and_falls_back_to_bytes() -> None:
    tokenizer, _ = sentencepiece()
    ids = tokenizer.encode("hello é")
    assert ids[0] == 1
    assert ids[-2:] == [3 + 0xC3, 3 + 0xA9]
    assert tokenizer.decode(ids) == "hello é"


def test_sentencepiece_without_space_prefix() -> None:
    tokenizer, _ = made_from(sentencepiece_metadata(ggml__add_space_prefix=False))
    ids = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.token_text(ids[0]) == "h"
    assert tokenizer.decode(tokenizer.encode(" hello")) == " hello"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.pre": "martian"}, "'martian'"),
        ({"tokenizer.ggml.model": "t5"}, "'t5'"),
        ({"tokenizer.ggml.model": None}, "None"),
    ],
)
def test_an_unknown_kind_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        load_tokenizer(gguf_metadata=byte_level_metadata("gpt-2") | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["no such"]}, "merges"),
        ({"tokenizer.ggml.merges": ["one"]}, "merges"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "eos_token_id"),
        ({"tokenizer.ggml.model": "llama"}, "scores"),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.0]}, "scores"),
    ],
)
def test_malformed_metadata_is_refused_by_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CorruptFileError, match=message):
        load_tokenizer(gguf_metadata=byte_level_metadata("gpt-2") | change)


@pytest.mark.filterwarnings("default")  # the library imports whatever else is installed
def test_a_folder_loads_and_ignores_truncation_and_padding(tmp_path: Path) -> None:
    _, hf = made_from(byte_level_metadata("gpt-2", chat_template="{{ messages[0]['content'] }}"))
    hf.backend_tokenizer.enable_truncation(2)
    hf.backend_tokenizer.enable_padding(length=8)
    hf.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert len(tokenizer.encode("abc")) == 3
    assert tokenizer.eos_token_ids == (1,)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "abc"}]) == tokenizer.encode("abc")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(LoadError, match=str(tmp_path)):
        load_tokenizer(str(tmp_path))


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="nowhere"):
        load_tokenizer(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError):
        load_tokenizer()


def test_a_chat_template_is_checked_at_once() -> None:
    metadata = byte_level_metadata("gpt-2")
    with pytest.raises(ConfigError, match="chat template is not valid Jinja: line 2"):
        load_tokenizer(gguf_metadata=metadata, chat_template="{# a #}\n{% if %}")
    refuses = "{{ raise_exception('no system message') }}"
    assert load_tokenizer(gguf_metadata=metadata, chat_template=refuses).chat_template == refuses


def test_encoding_lets_other_threads_run() -> None:
    tokenizer, _ = made_from(byte_level_metadata("gpt-2"))
    longest = 0.0
    done = threading.Event()

    def watch() -> None:
        nonlocal longest
        last = time.perf_counter()
        while not done.wait(0.005):
            now = time.perf_counter()
            longest, last = max(longest, now - last), now

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    tokenizer.encode("a " * 500_000)
    took = time.perf_counter() - began
    done.set()
    watcher.join()
    assert longest < 0.5 * took


def test_a_tokenizer_that_cannot_be_streamed_is_refused() -> None:
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    from jaxserve.tokenizer.tokenizer import Tokenizer as Ours

    backend = Tokenizer(models.WordLevel({"a": 0}))
    backend.decoder = decoders.CTC()
    with pytest.raises(UnsupportedModelError, match="CTC"):
        Ours(PreTrainedTokenizerFast(tokenizer_object=backend))


def test_a_tokenizer_without_decoder_joins_words_by_spaces() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from jaxserve.tokenizer.tokenizer import Tokenizer as Ours

    backend = Tokenizer(models.WordLevel({"hello": 0, "world": 1}))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = Ours(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert tokenizer.decode(tokenizer.encode("hello world hello")) == "hello world hello"
