"""Structures within free text: once a trigger is there, the rest of a tag is certain."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from jaxserve.errors import RequestError
from jaxserve.sampling_params import StructuredOutputsParams
from tests.structured.test_grammar import GRAMMARS, constraint_of, legal
from tests.structured.vocabulary import EOS, THINK, encode, text_of

SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
TAGS: dict[str, Any] = {
    "structures": [
        {"begin": "<f:x>", "schema": SCHEMA, "end": "</f>"},
        {"begin": "<f:bb>", "schema": {"enum": [1, 2]}, "end": "</f>"},
        {"begin": "[g]", "schema": True, "end": ""},
    ],
    "triggers": ["<f:", "[g"],
}


def after(text: str, wanted: dict[str, Any] = TAGS, **more: Any) -> Any:
    constraint = constraint_of(StructuredOutputsParams(structural_tag=wanted), **more)
    for token in encode(text):
        assert token in legal(constraint), text_of([token])
        constraint.advance((token,))
    return constraint


def finished(constraint: Any, rng: random.Random, end: str) -> str:
    """Random legal text up to ``end``."""
    text = ""
    while not text.endswith(end):
        token = rng.choice(legal(constraint))
        assert token != EOS
        text += text_of([token])
        constraint.advance((token,))
        assert len(text) < 200
    return text


def test_text_is_free_until_a_trigger_and_after_an_end() -> None:
    for text in ("", "hi <f", "a [ <f> :", 'x <f:x>{"a":true}</f>', 'x <f:bb>2</f> b <f:x>{"a": false}</f>\n'):
        assert EOS in legal(after(text))
        assert len(legal(after(text))) > 50
    rng = random.Random(3)
    for _ in range(10):
        text = finished(after("so <f:"), rng, "</f>")
        name, _, rest = text.partition(">")
        value = json.loads(rest.removesuffix("</f>"))
        assert value in ([{"a": True}, {"a": False}] if name == "x" else [1, 2])


def test_a_trigger_may_be_a_token_that_is_no_text() -> None:
    wanted = {"structures": [{"begin": "<think>f[", "schema": SCHEMA, "end": "]"}], "triggers": ["<think>"]}
    constraint = after("hi ", wanted)
    assert THINK in legal(constraint)
    constraint.advance((THINK,))
    assert finished(constraint, random.Random(1), "]").startswith("f[{")
    assert EOS in legal(constraint)
    assert THINK in legal(constraint)
    # Nor does it help to spell it.
    assert EOS not in legal(after("<think>", wanted))


@pytest.mark.parametrize(
    ("wanted", "part"),
    [
        ({}, "triggers"),
        ({"structures": [], "triggers": ["x"]}, "structures"),
        ({**TAGS, "triggers": []}, "triggers"),
        ({**TAGS, "triggers": ["<f:"]}, "none of the triggers"),
        ({**TAGS, "triggers": ["<f:", "[g", "z"]}, "no structure begins"),
        ({**TAGS, "format": {}}, "structures and triggers"),
        ({"structures": [{"begin": 5}], "triggers": ["x"]}, "strings"),
        ({"structures": [{"begin": "x", "schema": 5}], "triggers": ["x"]}, "schema"),
        ({"structures": [{"begin": "x", "schema": {"type": "no"}}], "triggers": ["x"]}, "cannot be used"),
    ],
)
def test_what_is_no_structural_tag(wanted: Any, part: str) -> None:
    with pytest.raises(RequestError, match=part):
        GRAMMARS.get(StructuredOutputsParams(structural_tag=wanted))
    with pytest.raises(RequestError, match="structural_tag is no JSON"):
        StructuredOutputsParams(structural_tag="{")
