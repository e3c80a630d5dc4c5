"""Where the tokens of an echoed prompt begin in its text, with real tokenizers."""

from __future__ import annotations

from itertools import pairwise

import pytest

from jaxserve.server.logprobs import EchoOffsets, TextOffsets
from jaxserve.tokenizer import Tokenizer
from tests.tokenizer.samples import byte_level_metadata, made_from, sentencepiece


def offsets(tokenizer: Tokenizer, text: str, ids: list[int]) -> list[int]:
    echo = EchoOffsets(tokenizer, text, ids)
    return [echo.next(token) for token in ids]


def with_bos() -> Tokenizer:
    return made_from(byte_level_metadata("gpt-2", ["h e", "l l"], ggml__add_bos_token=True))[0]


def test_a_token_put_before_the_text_takes_no_room() -> None:
    tokenizer = with_bos()
    ids = tokenizer.encode("hell")
    assert [tokenizer.token_text(token) for token in ids] == ["<s>", "he", "ll"]
    assert offsets(tokenizer, "hell", ids) == [0, 0, 2]
    # As ids, with special tokens shown, it is part of the text.
    assert offsets(tokenizer, tokenizer.decode(ids, skip_special_tokens=False), ids) == [0, 3, 5]
    assert offsets(tokenizer, tokenizer.decode(ids), ids) == [0, 0, 2]


def test_special_tokens_that_the_text_holds_take_theirs() -> None:
    tokenizer = with_bos()
    text = "he<end>ll<tool>ß🦙"
    ids = tokenizer.encode(text)
    found = offsets(tokenizer, text, ids)
    # A character may span tokens, which all begin where it does.
    assert found == [0, 0, 2, 7, 9, *[15] * 2, *[16] * 4]
    shown = [tokenizer.token_text(token) for token in ids[1:5]]
    assert shown == [text[begin:end] for begin, end in pairwise(found[1:6])]


@pytest.mark.parametrize("text", ["hello world", "world", "  hello", "hello", "ďhello"])
def test_the_space_before_a_sentencepiece_text_takes_no_room(text: str) -> None:
    tokenizer, _ = sentencepiece()
    ids = tokenizer.encode(text)
    found = offsets(tokenizer, text, ids)
    assert found[:2] == [0, 0]  # <s>, and what begins the text
    *inner, last = found
    assert sorted(found) == found
    assert text[last:] == tokenizer.token_text(ids[-1]).lstrip(" " if last == 0 else "")
    assert max(inner) <= last < len(text)


def test_completions_go_on_from_the_end_of_the_echo() -> None:
    tokenizer, _ = sentencepiece()
    after = TextOffsets(tokenizer, skip_special=True, start=5)
    ids = tokenizer.encode("hello world")
    assert tokenizer.token_text(ids[-1]) == " world"
    assert [after.next(ids[-1]), after.next(ids[-1])] == [5, 11]
