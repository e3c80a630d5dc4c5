"""Sampling parameters of a wrong type are refused with their name, and in a few words."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from jaxserve.errors import RequestError
from jaxserve.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", 5),
        ("stop", {"a": 1}),
        ("bad_words", 5),
        ("stop_token_ids", 5),
        ("stop_token_ids", "12"),
        ("allowed_token_ids", 5),
        ("logit_bias", [1]),
        ("logit_bias", {1.7: 1}),
        ("logit_bias", {"1_0": 1}),
        ("logit_bias", {" 5 ": 1}),
        ("logit_bias", {"\u0665": 1}),
        ("logit_bias", {"9" * 5000: 1}),
        ("logit_bias", {float("inf"): 1}),
        ("logit_bias", {1: 10**5000}),
        ("n", 10**5000),
        ("temperature", 10**5000),
        ("max_tokens", "9" * 10**6),
        ("logprobs_mode", "raw_logits"),
        ("logprobs_mode", ["x" * 1000]),
        ("detokenize", 0),
    ],
    ids=itertools.count(),
)
def test_wrong_types_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert len(str(caught.value)) < 200


def test_stop_strings_need_a_text() -> None:
    with pytest.raises(RequestError, match="stop needs a text") as caught:
        SamplingParams(stop="a", detokenize=False)
    assert caught.value.param == "stop"


def test_lists_may_be_of_any_kind() -> None:
    params = SamplingParams(stop="a", bad_words=None, stop_token_ids=range(2), logit_bias={"7": 1})  # type: ignore[arg-type, dict-item]
    assert (params.stop, params.bad_words, params.stop_token_ids) == (("a",), (), (0, 1))
    assert params.logit_bias == {7: 1.0}
    assert params.allowed_token_ids is None
