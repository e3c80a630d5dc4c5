"""Text made token by token is the text of all tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.tokenizer import IncrementalDetokenizer, Tokenizer, replace_surrogates
from tests.tokenizer.samples import TEXTS, WORDS, byte_level_metadata, made_from, sentencepiece, smollm2

BYTE_LEVEL, _ = made_from(byte_level_metadata("gpt-2"))


def stream(tokenizer: Tokenizer, ids: Sequence[int], prompt: Sequence[int] = (), *, skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip)
    return [*(detokenizer.push((token,)) for token in ids), detokenizer.flush()]


def ids_of(data: bytes) -> list[int]:
    by_bytes = {BYTE_LEVEL.token_bytes(i): i for i in range(BYTE_LEVEL.vocab_size)}
    return [by_bytes[bytes((byte,))] for byte in data]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("make", [smollm2, sentencepiece, lambda: (BYTE_LEVEL, None)])
def test_no_chunk_holds_half_a_character(make: Any, text: str) -> None:
    tokenizer = make()[0]
    chunks = stream(tokenizer, tokenizer.encode(text, add_special_tokens=False))
    assert "".join(chunks) == text
    assert all(chunk in text for chunk in chunks)
    assert chunks[-1] == ""  # nothing had to wait for the end


@given(ids=st.lists(st.integers(0, 49151), max_size=30), skip=st.booleans(), data=st.data())
def test_stream_equals_the_librarys_decode_of_random_ids(ids: list[int], skip: bool, data: st.DataObject) -> None:
    tokenizer, hf = smollm2()
    cut = data.draw(st.integers(0, len(ids)))
    detokenizer = IncrementalDetokenizer(tokenizer, ids[:3], skip)
    text = detokenizer.push(ids[:cut]) + detokenizer.push(ids[cut:]) + detokenizer.flush()
    assert text == "".join(stream(tokenizer, ids, skip=skip))
    assert text == tokenizer.decode(ids, skip_special_tokens=skip)
    assert text == hf.backend_tokenizer.decode(ids, skip_special_tokens=skip)


@given(data=st.binary(max_size=24))
def test_bytes_that_are_no_text_come_out_replaced_and_in_time(data: bytes) -> None:
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, (), True)
    text = ""
    for seen, token in enumerate(ids_of(data), start=1):
        text += detokenizer.push((token,))
        # At most three bytes of an unfinished character may still be waiting.
        assert any(text == data[:end].decode("utf-8", "replace") for end in range(max(0, seen - 3), seen + 1))
    assert text + detokenizer.flush() == data.decode("utf-8", "replace")


def test_an_unfinished_character_is_replaced_at_the_end() -> None:
    assert stream(BYTE_LEVEL, ids_of(b"a\xf0\x9f")) == ["a", "", "", "�"]


def test_an_invalid_byte_does_not_stall_the_stream() -> None:
    assert stream(BYTE_LEVEL, ids_of(b"\xffabc")) == ["�", "a", "b", "c", ""]
    assert stream(BYTE_LEVEL, ids_of(b"\xe6\x97a")) == ["", "", "�a", ""]


@given(text=st.text("abcdehlorw é日🦙", max_size=20))
def test_sentencepiece_stream_equals_the_librarys_decode(text: str) -> None:
    tokenizer, hf = sentencepiece()
    ids = tokenizer.encode(text)
    assert "".join(stream(tokenizer, ids)) == hf.backend_tokenizer.decode(ids, skip_special_tokens=True) == text
    assert "".join(stream(tokenizer, ids, skip=False)) == hf.backend_tokenizer.decode(ids, skip_special_tokens=False)


def test_sentencepiece_space_depends_on_what_stands_before() -> None:
    tokenizer, _ = sentencepiece()
    hello = tokenizer.encode("hello", add_special_tokens=False)
    bos = [tokenizer.bos_token_id or 0]
    assert stream(tokenizer, hello + hello) == ["hello", " hello", ""]
    assert stream(tokenizer, hello, prompt=hello) == [" hello", ""]
    assert stream(tokenizer, hello, prompt=bos) == ["hello", ""]  # a special token is no text
    assert stream(tokenizer, hello, prompt=bos, skip=False) == [" hello", ""]
    assert stream(tokenizer, bos + hello) == ["", "hello", ""]


@given(
    prompt=st.lists(st.integers(0, 258 + len(WORDS)), max_size=6),
    ids=st.lists(st.integers(259, 258 + len(WORDS)), max_size=6),
)
def test_sentencepiece_output_continues_the_prompt(prompt: list[int], ids: list[int]) -> None:
    tokenizer, _ = sentencepiece()
    # Whole characters only: a prompt that ends inside one keeps its bytes to itself.
    prompt = [token for token in prompt if not 3 + 0x80 <= token < 3 + 256]
    assert tokenizer.decode(prompt) + "".join(stream(tokenizer, ids, prompt)) == tokenizer.decode(prompt + ids)


def test_a_prompt_that_ends_inside_a_character_does_not_leak_into_the_output() -> None:
    start, end = ids_of("é".encode())
    assert "".join(stream(BYTE_LEVEL, [end], prompt=[start])) == BYTE_LEVEL.decode([end]) == "�"


def test_ids_that_are_no_tokens_are_no_text() -> None:
    a = BYTE_LEVEL.encode("a")
    assert BYTE_LEVEL.decode([*a, BYTE_LEVEL.vocab_size, 10**9, -1, *a]) == "aa"


def test_tokens_as_bytes_and_text() -> None:
    half = ids_of(b"\xc3")[0]
    assert BYTE_LEVEL.token_bytes(half) == b"\xc3"
    assert BYTE_LEVEL.token_text(half) == "�"
    assert BYTE_LEVEL.token_text(BYTE_LEVEL.encode("<end>")[0]) == "<end>"
    assert sentencepiece()[0].token_text(sentencepiece()[0].encode("hello")[1]) == " hello"
    assert sentencepiece()[0].token_bytes(3 + 0xC3) == b"\xc3"


def test_lone_surrogates_are_replaced() -> None:
    assert replace_surrogates("a\ud83d\udcf0b") == "a📰b"
    assert replace_surrogates("emoji \ud83d") == "emoji �"
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode("\udcf0")) == "�"
