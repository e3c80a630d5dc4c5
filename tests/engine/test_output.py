"""Token events become text, whole or in parts, and stop strings end it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.engine.output import OutputProcessor
from jaxserve.errors import RequestError
from jaxserve.outputs import CompletionOutput, Logprob, RequestOutput, TokenEvent
from jaxserve.plan import TokenLogprobs
from jaxserve.request import FinishReason, Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.tokenizer import Tokenizer
from tests.tokenizer.samples import TEXTS, byte_level_metadata, made_from, sentencepiece, smollm2

TOKENIZER, _ = made_from(byte_level_metadata("gpt-2"))
EOS = 1
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def request(id: str = "r", prompt: Sequence[int] = (50, 51), **params: Any) -> Request:
    given = SamplingParams(**params)
    return Request(id, list(prompt), given, seed=0, stop_ids=frozenset((EOS,)), max_total=1000)


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


class Run:
    """One request, fed by hand."""

    def __init__(self, *, stream: bool = True, tokenizer: Tokenizer = TOKENIZER, n: int = 1, **params: Any) -> None:
        self.processor = OutputProcessor(tokenizer)
        self.ids = ["r"] if n == 1 else [f"r-{i}" for i in range(n)]
        self.processor.add("r", "prompt", [request(id, **params) for id in self.ids], stream=stream)
        self.outputs: list[RequestOutput] = []
        self.stopped: list[str] = []

    def feed(self, tokens: str | Sequence[int] = (), *, child: int = 0, **event: Any) -> list[RequestOutput]:
        token_ids = ids_of(tokens) if isinstance(tokens, str) else tuple(tokens)
        outputs, stopped = self.processor.process([TokenEvent(self.ids[child], token_ids, **event)])
        self.outputs += outputs
        self.stopped += stopped
        return outputs

    def parts(self) -> list[CompletionOutput]:
        return [part for output in self.outputs for part in output.outputs]

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts())

    @property
    def token_ids(self) -> list[int]:
        return [token for part in self.parts() for token in part.token_ids]

    @property
    def end(self) -> tuple[str | None, str | int | None]:
        last = self.parts()[-1]
        return last.finish_reason, last.stop_reason


def cut(tokens: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Steps of the given sizes, in turns."""
    left = list(tokens)
    steps: list[tuple[int, ...]] = []
    for size in itertools.cycle(sizes):
        if not left:
            return steps
        steps.append(tuple(left[:size]))
        del left[:size]
    return []


def play(tokens: Sequence[int], sizes: Sequence[int], finish: FinishReason = LENGTH, **options: Any) -> Run:
    run = Run(**options)
    steps = cut(tokens, sizes)
    for step in steps[:-1]:
        run.feed(step)
    run.feed(steps[-1], finish=finish)
    return run


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("make", [smollm2, sentencepiece])
def test_joined_parts_are_the_whole_answer(make: Any, text: str) -> None:
    tokenizer = make()[0]
    ids = tokenizer.encode(text, add_special_tokens=False)
    streamed = play(ids, [1], tokenizer=tokenizer, prompt=[0])
    whole = play(ids, [3, 1], tokenizer=tokenizer, prompt=[0], stream=False)
    assert streamed.text == whole.text == text
    assert streamed.token_ids == whole.token_ids == ids
    assert all("�" not in part.text or "�" in text for part in streamed.parts())


@given(
    ids=st.lists(st.integers(0, 49151), min_size=1, max_size=20),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    skip=st.booleans(),
    stop=st.lists(st.text("ae n�", min_size=1, max_size=3), max_size=3),
)
def test_grouping_into_steps_and_streaming_change_nothing(
    ids: list[int], sizes: list[int], skip: bool, stop: list[str]
) -> None:
    tokenizer, _ = smollm2()
    options: dict[str, Any] = {"tokenizer": tokenizer, "skip_special_tokens": skip, "stop": tuple(stop)}
    streamed, whole = play(ids, sizes, **options), play(ids, [len(ids)], stream=False, **options)
    assert streamed.text == whole.text
    assert streamed.token_ids == whole.token_ids
    assert streamed.end == whole.end
    if whole.end[0] == "length":
        assert whole.text == tokenizer.decode(ids, skip_special_tokens=skip)
        assert whole.token_ids == ids


def test_without_streaming_there_is_one_output() -> None:
    run = play(ids_of("hello"), [1], stream=False)
    assert len(run.outputs) == 1
    (output,) = run.outputs
    assert output.finished
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("r", "prompt", [50, 51])
    assert output.outputs[0].text == "hello"


def test_a_token_without_text_is_still_reported() -> None:
    run = Run()
    first, second, third, fourth = ids_of("🦙")
    for token in (first, second, third):
        (output,) = run.feed([token])
        assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", [token])
    assert run.feed([fourth])[0].outputs[0].text == "🦙"


def test_an_event_without_news_makes_no_output() -> None:
    assert Run().feed(num_cached=2, scheduled_at=1.0) == []


def test_an_unfinished_character_comes_out_at_the_end() -> None:
    run = Run()
    run.feed(ids_of("a🦙")[:3])
    run.feed(finish=FinishReason.ABORT)
    assert run.text == "a�"
    assert run.end == ("abort", None)


def test_a_stop_string_over_several_tokens_is_never_sent() -> None:
    run = Run(stop="DEFGHIJ")
    for char in "ABCDEFGHI":
        run.feed(char)
        assert "D" not in run.text
    (output,) = run.feed("J")
    assert run.text == "ABC"
    assert run.end == ("stop", "DEFGHIJ")
    assert output.finished
    assert run.stopped == ["r"]
    assert run.token_ids == list(ids_of("ABCDEFGHIJ"))


def test_tokens_after_a_match_do_not_count() -> None:
    run = Run(stop="b")
    run.feed("abcd")
    assert run.feed("ef") == []
    assert run.feed(finish=FinishReason.ABORT) == []
    assert run.text == "a"
    assert run.token_ids == list(ids_of("ab"))
    assert run.stopped == ["r"]


def test_a_stop_string_may_stay_in_the_text() -> None:
    run = Run(stop="b", include_stop_str_in_output=True)
    run.feed("abc")
    assert run.text == "ab"


def test_a_match_wins_over_the_engines_reason() -> None:
    run = Run(stop="c")
    run.feed("abc", finish=LENGTH)
    assert run.end == ("stop", "c")
    assert run.stopped == []  # the engine has ended it already


def test_text_held_back_comes_out_at_the_end() -> None:
    run = Run(stop="bcd")
    run.feed("abc")
    assert run.text == "a"
    run.feed(finish=LENGTH)
    assert run.text == "abc"


def test_the_prompt_is_no_part_of_a_match() -> None:
    run = Run(prompt=ids_of("xa"), stop="ab")
    run.feed("b", finish=LENGTH)
    assert (run.text, run.end) == ("b", ("length", None))


def test_stop_strings_wait_for_min_tokens() -> None:
    run = Run(stop="b", min_tokens=3)
    run.feed("bab")
    assert run.text == "bab"
    run.feed("ab")
    assert run.text == "baba"
    assert run.end == ("stop", "b")
    assert run.token_ids == list(ids_of("babab"))


@pytest.mark.parametrize(
    ("token", "params", "text"),
    [
        (EOS, {}, "a"),
        (EOS, {"skip_special_tokens": False}, "a"),
        (EOS, {"skip_special_tokens": False, "include_stop_str_in_output": True}, "a</s>"),
        (EOS, {"include_stop_str_in_output": True}, "a"),
        (ids_of("x")[0], {}, "a"),
        (ids_of("x")[0], {"include_stop_str_in_output": True}, "ax"),
    ],
)
def test_the_token_that_ends_the_output_counts_but_is_not_shown(token: int, params: dict[str, Any], text: str) -> None:
    run = Run(**params)
    run.feed([*ids_of("a"), token], finish=STOP, stop_reason=None if token == EOS else token)
    assert run.text == text
    assert run.token_ids == [*ids_of("a"), token]
    assert run.end == ("stop", None if token == EOS else token)


def test_special_tokens_within_the_output_are_shown_if_asked() -> None:
    ids = [*ids_of("a"), 2, *ids_of("b")]
    assert play(ids, [1]).text == "ab"
    assert play(ids, [1], skip_special_tokens=False).text == TOKENIZER.decode(ids, False) == "a<end>b"


def test_without_a_text_there_are_tokens_all_the_same() -> None:
    run = Run(detokenize=False, logprobs=0)
    entry = TokenLogprobs(-0.5, 1, ())
    run.feed("hi", logprobs=(entry, entry))
    run.feed("!", logprobs=(entry,), finish=LENGTH)
    assert (run.text, run.token_ids) == ("", list(ids_of("hi!")))
    assert run.parts()[0].logprobs[1] == {ids_of("hi")[1]: Logprob(-0.5, 1, "i")}  # type: ignore[index]
    assert run.end == ("length", None)


def test_an_error_carries_its_message() -> None:
    run = Run()
    (output,) = run.feed(finish=FinishReason.ERROR, error="out of luck")
    assert output.finished
    assert output.outputs[0].finish_reason == "error"
    assert output.outputs[0].error == "out of luck"


def test_log_probabilities_hold_the_sampled_token_first() -> None:
    a, b, c = ids_of("abc")
    entries = (TokenLogprobs(-2.0, 3, ((b, -0.5), (c, -1.0))), TokenLogprobs(-0.5, 1, ((b, -0.5), (c, -1.0))))
    run = Run(logprobs=2)
    run.feed([a], logprobs=entries[:1])
    run.feed([b], logprobs=entries[1:], finish=LENGTH)
    first, second = run.parts()
    assert first.logprobs == [{a: Logprob(-2.0, 3, "a"), b: Logprob(-0.5, 1, "b"), c: Logprob(-1.0, 2, "c")}]
    assert [list(entry) for entry in first.logprobs] == [[a, b, c]]
    assert second.logprobs == [{b: Logprob(-0.5, 1, "b"), c: Logprob(-1.0, 2, "c")}]
    assert (first.cumulative_logprob, second.cumulative_logprob) == (-2.0, -2.5)


def test_zero_log_probabilities_give_that_of_the_sampled_token() -> None:
    (a,) = ids_of("a")
    run = Run(logprobs=0, stream=False)
    run.feed([a], logprobs=(TokenLogprobs(0.0, 1, ()),), finish=LENGTH)
    (part,) = run.parts()
    assert part.logprobs == [{a: Logprob(0.0, 1, "a")}]
    assert part.cumulative_logprob == 0.0


def test_log_probabilities_end_with_the_text() -> None:
    a, b, c = ids_of("abc")
    run = Run(logprobs=0, stop="b")
    run.feed([a, b, c], logprobs=tuple(TokenLogprobs(-1.0, 1, ()) for _ in range(3)))
    assert [list(entry) for entry in run.parts()[0].logprobs or ()] == [[a], [b]]
    assert run.parts()[0].cumulative_logprob == -2.0


def test_without_log_probabilities_there_are_none() -> None:
    part = play(ids_of("a"), [1]).parts()[0]
    assert part.logprobs is None
    assert part.cumulative_logprob is None


def test_completions_are_streamed_as_they_come() -> None:
    run = Run(n=3)
    (output,) = run.feed("x", child=1)
    assert [part.index for part in output.outputs] == [1]
    assert not output.finished
    events = [TokenEvent("r-2", ids_of("z"), finish=LENGTH), TokenEvent("r-0", ids_of("y"), finish=LENGTH)]
    (output,), _ = run.processor.process(events)
    assert [(part.index, part.text, part.finish_reason) for part in output.outputs] == [
        (0, "y", "length"),
        (2, "z", "length"),
    ]
    assert not output.finished
    (output,) = run.feed(child=1, finish=LENGTH)
    assert [part.index for part in output.outputs] == [1]
    assert output.finished


def test_whole_completions_are_sorted_by_index() -> None:
    run = Run(n=3, stream=False)
    for child, text in ((2, "c"), (0, "a"), (1, "b")):
        run.feed(text, child=child, finish=LENGTH)
    (output,) = run.outputs
    assert [(part.index, part.text) for part in output.outputs] == [(0, "a"), (1, "b"), (2, "c")]


def test_one_completion_may_stop_while_others_run() -> None:
    run = Run(n=2, stop="b")
    run.feed("ab", child=0)
    assert run.stopped == ["r-0"]
    assert not run.outputs[-1].finished
    run.feed("c", child=1, finish=LENGTH)
    assert run.outputs[-1].finished


def test_requests_in_one_step_have_their_own_outputs() -> None:
    processor = OutputProcessor(TOKENIZER)
    for name in ("p", "q"):
        processor.add(name, None, [request(name)], stream=True)
    outputs, _ = processor.process([TokenEvent(name, ids_of(name)) for name in ("p", "q", "unknown")])
    assert [(output.request_id, output.outputs[0].text, output.prompt) for output in outputs] == [
        ("p", "p", None),
        ("q", "q", None),
    ]


def test_a_dropped_request_is_forgotten() -> None:
    run = Run(n=2)
    run.feed("a", child=0, finish=LENGTH)
    assert run.processor.open_ids("r") == run.processor.drop("r") == ["r-1"]
    assert run.feed("b", child=1) == []
    assert run.processor.open_ids("r") == run.processor.drop("r") == []
    run.processor.add("r", None, [request("r-0"), request("r-1")], stream=True)  # the ids are free again


def test_ids_are_free_after_the_end_and_not_before() -> None:
    run = Run()
    with pytest.raises(RequestError) as caught:
        run.processor.add("r", None, [request("other")], stream=True)
    assert caught.value.param == "request_id"
    with pytest.raises(RequestError):
        run.processor.add("other", None, [request("r")], stream=True)
    run.feed("a", finish=LENGTH)
    run.processor.add("r", None, [request("r")], stream=True)


def test_metrics_and_cached_tokens_are_reported() -> None:
    before = time.monotonic()
    run = Run()
    run.feed(scheduled_at=before, num_cached=1)
    (first,) = run.feed("a", scheduled_at=before, num_cached=1)
    (last,) = run.feed("b", scheduled_at=before, num_cached=1, num_preemptions=2, finish=LENGTH)
    assert first.metrics.arrived_at > 0
    assert first.metrics.scheduled_at == before
    assert first.metrics.finished_at == 0.0
    assert before <= first.metrics.first_token_at == last.metrics.first_token_at <= last.metrics.finished_at
    assert (first.metrics.num_preemptions, last.metrics.num_preemptions) == (0, 2)
    assert first.num_cached_tokens == last.num_cached_tokens == 1


def test_surrogates_of_the_prompt_are_not_handed_back() -> None:
    processor = OutputProcessor(TOKENIZER)
    processor.add("r", "emoji \ud83d", [request()], stream=True)
    (output,), _ = processor.process([TokenEvent("r", ids_of("a"))])
    assert output.prompt == "emoji �"


def test_drafts_past_the_end_of_the_text_are_not_accepted() -> None:
    run = Run(stop=["d"], n=2)
    run.feed("abc", num_drafts=4, num_accepted=2)
    first = run.feed("a", child=1, num_drafts=1)[0].metrics.speculation
    assert (first.num_drafts, first.num_draft_tokens, first.num_accepted_tokens) == (2, 5, 2)
    run.feed("ef", child=1, num_drafts=0)
    last = run.feed("cdefg", num_drafts=4, num_accepted=4)[0].metrics.speculation
    assert (last.num_drafts, last.num_draft_tokens, last.num_accepted_tokens) == (3, 9, 4)
    assert last.accepted_by_position == [2, 2]
    assert first.num_drafts == 2, "an output stays as it was"
