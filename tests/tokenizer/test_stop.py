"""Stop strings are found, and hidden, however the text was cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.tokenizer import StopMatcher


def oracle(text: str, stops: list[str], include: bool, unarmed: int = 0) -> tuple[str, str | None]:
    """The shortest beginning of the text that ends in a stop string, and the longest that it ends in."""
    for end in range(unarmed + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def run(chunks: list[str], stops: list[str], include: bool = False) -> tuple[list[str], str | None]:
    matcher, sent = StopMatcher(stops, include), []
    for chunk in chunks:
        text, matched = matcher.push(chunk)
        sent.append(text)
        if matched is not None:
            assert matcher.push("more") == ("", None)
            assert matcher.flush() == ""
            return sent, matched
    return [*sent, matcher.flush()], None


@st.composite
def cut_texts(draw: st.DrawFn) -> list[str]:
    return draw(st.lists(st.text("ab", max_size=4), max_size=10))


@given(chunks=cut_texts(), stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4), include=st.booleans())
def test_every_cut_gives_what_the_whole_text_gives(chunks: list[str], stops: list[str], include: bool) -> None:
    sent, matched = run(chunks, stops, include)
    assert ("".join(sent), matched) == oracle("".join(chunks), stops, include)


@given(
    before=cut_texts(),
    after=cut_texts(),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    include=st.booleans(),
)
def test_matches_within_the_unarmed_part_do_not_count(
    before: list[str], after: list[str], stops: list[str], include: bool
) -> None:
    matcher = StopMatcher(stops, include)
    parts = [matcher.push(chunk, armed=False) for chunk in before] + [matcher.push(chunk) for chunk in after]
    text = "".join(part for part, _ in parts) + matcher.flush()
    matched = next((stop for _, stop in parts if stop is not None), None)
    assert (text, matched) == oracle("".join(before + after), stops, include, unarmed=len("".join(before)))


@given(chunks=cut_texts(), stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4))
def test_only_the_beginning_of_a_stop_string_is_held_back(chunks: list[str], stops: list[str]) -> None:
    matcher, seen, sent = StopMatcher(stops), "", ""
    for chunk in chunks:
        text, matched = matcher.push(chunk)
        seen, sent = seen + chunk, sent + text
        if matched is not None:
            return
        begins = [k for stop in stops for k in range(1, len(stop)) if seen.endswith(stop[:k])]
        assert len(seen) - len(sent) == max(begins, default=0)


def test_a_string_over_several_pieces_is_never_sent() -> None:
    sent, matched = run(["A", "BC", "D", "EFG", "HI", "JKL"], ["DEFGHIJ"])
    assert sent == ["A", "BC", "", "", "", ""]
    assert matched == "DEFGHIJ"


def test_a_false_start_is_sent_as_soon_as_it_is_one() -> None:
    assert run(["D", "E", "x", "y"], ["DEF"])[0] == ["", "", "DEx", "y", ""]


def test_the_string_that_completes_first_wins() -> None:
    assert run(["xabcd"], ["abcd", "c"]) == (["xab"], "c")
    assert run(["xabc"], ["c", "abc", "bc"]) == (["x"], "abc")


def test_included_strings_end_the_text() -> None:
    assert run(["one ST", "OP two"], ["STOP"], include=True) == (["one ", "STOP"], "STOP")


def test_without_stop_strings_nothing_is_held() -> None:
    assert run(["a", "b"], []) == (["a", "b", ""], None)


@pytest.mark.parametrize("stops", [["ab"], ["ab", "abab"]])
def test_an_unarmed_match_is_ordinary_text(stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    first, matched = matcher.push("xab", armed=False)
    assert matched is None
    second, matched = matcher.push("yab")
    assert (first + second, matched) == ("xaby", "ab")


def test_a_match_that_begins_unarmed_and_completes_armed_counts() -> None:
    matcher = StopMatcher(["abc"])
    assert matcher.push("xab", armed=False) == ("x", None)
    assert matcher.push("c") == ("", "abc")


def test_long_strings_cost_no_more_per_character() -> None:
    matcher = StopMatcher(["a" * 20_000 + "b"] * 64)
    sent = "".join(matcher.push("a" * 100)[0] for _ in range(500))
    assert len(sent) == 30_000
