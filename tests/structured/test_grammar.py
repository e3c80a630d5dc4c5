"""Grammars: whatever is sampled within the mask satisfies them, and what cannot be served is refused by name."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from typing import Any

import jsonschema
import llguidance
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.errors import RequestError
from jaxserve.plan import NO_DRAFTS
from jaxserve.sampling_params import SamplingParams, StructuredOutputsParams
from jaxserve.structured import Constraint, Grammar, Grammars, Vocabulary, make_constraint, step_mask
from tests.structured.vocabulary import EOS, SIZE, THINK, VOCABULARY, encode, text_of

GRAMMARS = Grammars(lambda: VOCABULARY)
PERSON = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "maxLength": 3},
        "b": {"type": "array", "items": {"type": "integer", "minimum": -20, "maximum": 99}, "maxItems": 3},
        "c": {"enum": ["ab", None, True]},
        "d": {"$ref": "#/$defs/d"},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
    "$defs": {"d": {"type": "object", "properties": {"e": {"type": "boolean"}}, "additionalProperties": False}},
}


def constraint_of(wanted: StructuredOutputsParams, **params: Any) -> Constraint:
    made = make_constraint(
        SamplingParams(structured_outputs=wanted, **params),
        vocab_size=SIZE,
        stop_ids=frozenset({EOS}),
        bad_word_ids=[],
        grammar=GRAMMARS.get(wanted),
    )
    assert made is not None
    return made


def legal(constraint: Constraint) -> list[int]:
    mask = step_mask([(constraint, 0, NO_DRAFTS)], SIZE)
    assert mask is not None
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def sample(constraint: Constraint, rng: random.Random, most: int = 400) -> list[int] | None:
    """Random legal tokens up to the end; None if it does not come."""
    output: list[int] = []
    while len(output) < most:
        token = rng.choice(legal(constraint))
        if token == EOS:
            return output
        output.append(token)
        constraint.advance((token,))
    return None


@given(seed=st.integers(0, 10**6))
@settings(max_examples=25)
def test_all_that_is_legal_satisfies_the_schema(seed: int) -> None:
    output = sample(constraint_of(StructuredOutputsParams(json=PERSON)), random.Random(seed))
    assert output is not None
    jsonschema.validate(json.loads(text_of(output)), PERSON)


@pytest.mark.parametrize(
    ("wanted", "is_right"),
    [
        (StructuredOutputsParams(regex="[a-c]{2}-(x|日)+1?"), lambda s: re.fullmatch("[a-c]{2}-(x|日)+1?", s)),
        (StructuredOutputsParams(regex="^a/b$"), lambda s: s == "a/b"),
        (StructuredOutputsParams(choice=["ab", 'a"\n日', "abc"]), lambda s: s in ("ab", 'a"\n日', "abc")),
        (
            StructuredOutputsParams(grammar='start: "a" start "b" | "x"'),
            lambda s: re.fullmatch("a*xb*", s) and s.count("a") == s.count("b"),
        ),
        (StructuredOutputsParams(grammar='root ::= "a" | "b" root'), lambda s: re.fullmatch("b*a", s)),
        (StructuredOutputsParams(json_object=True), lambda s: isinstance(json.loads(s), dict)),
        (
            StructuredOutputsParams(json='{"type": "integer"}', whitespace_pattern="a"),
            lambda s: isinstance(json.loads(s), int),
        ),
    ],
    ids=lambda value: value.kind if isinstance(value, StructuredOutputsParams) else "",
)
def test_every_kind(wanted: StructuredOutputsParams, is_right: Any) -> None:
    texts = set()
    for seed in range(12):
        output = sample(constraint_of(wanted), random.Random(seed))
        if output is not None:
            texts.add(text_of(output))
    assert texts
    assert all(is_right(text) for text in texts), texts


def test_whitespace_and_further_properties() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}

    def accepts(text: str, **settings: bool) -> bool:
        constraint = constraint_of(StructuredOutputsParams(json=schema, **settings))  # type: ignore[arg-type]
        for token in encode(text):
            if token not in legal(constraint):
                return False
            constraint.advance((token,))
        return EOS in legal(constraint)

    assert accepts('{\n "a": 1}')
    assert not accepts("{" + 25 * " " + '"a": 1}')
    assert not accepts('{"a": 1}', disable_any_whitespace=True)
    assert accepts('{"a":1}', disable_any_whitespace=True)
    assert accepts('{"a":1,"b":2}')
    assert not accepts('{"a":1,"b":2}', disable_additional_properties=True)


@given(steps=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), max_size=8), seed=st.integers(0, 99))
@settings(max_examples=30)
def test_rollback_undoes_whatever_was_advanced(steps: list[tuple[int, int]], seed: int) -> None:
    """Also beyond the end of the grammar, and past tokens that it does not know."""
    wanted, rng = StructuredOutputsParams(regex="a{1,4}b?c{2}"), random.Random(seed)
    constraint, output = constraint_of(wanted), []
    for forth, back in steps:
        for _ in range(forth):
            token = rng.choice(legal(constraint)) if rng.random() < 0.8 else rng.randrange(SIZE)
            constraint.advance((token,))
            output.append(token)
        back = min(back, len(output))
        constraint.rollback(back)
        del output[len(output) - back :]
        fresh = constraint_of(wanted)
        fresh.advance(tuple(output))
        assert legal(constraint) == legal(fresh)


def test_the_end_comes_as_asked() -> None:
    wanted = StructuredOutputsParams(regex="a{2,5}")

    def longest(**params: Any) -> list[int]:
        constraint = constraint_of(wanted, **params)
        ends = []
        for length in range(6):
            if EOS in legal(constraint):
                ends.append(length)
            constraint.advance(tuple(encode("a")))
        return ends

    assert longest() == [2, 3, 4, 5]
    assert longest(min_tokens=4) == [4, 5]
    assert longest(ignore_eos=True) == longest(min_tokens=9) == [5]  # where nothing else is legal


def test_free_text_before() -> None:
    def accepted(wanted: StructuredOutputsParams, ids: list[int]) -> bool:
        constraint = constraint_of(wanted)
        for token in ids:
            if token not in legal(constraint):
                return False
            constraint.advance((token,))
        return legal(constraint) == [EOS]

    special = StructuredOutputsParams(choice=["ab"], reasoning=("<think>", "</think>"))
    assert accepted(special, [THINK, *encode('x {"ab"} x'), THINK + 1, *encode("\n\nab")])
    assert accepted(special, encode("ab"))
    assert not accepted(special, encode("x ab"))
    inside = StructuredOutputsParams(choice=["ab"], reasoning=("", "</e>"))
    assert accepted(inside, encode("ab</x> a</e>ab"))
    assert not accepted(inside, encode("ab"))
    assert accepted(StructuredOutputsParams(choice=["ab"], reasoning=("<e>", "</e>")), encode("<e>i</e> ab"))


def test_a_tokenizer_that_begins_with_a_space() -> None:
    spaced = Vocabulary(VOCABULARY.tokens, VOCABULARY.special_ids, (EOS,), lambda text: encode(" " + text))
    grammar = Grammars(lambda: spaced).get(StructuredOutputsParams(choice=['{"ab": null}']))
    constraint, output = grammar.constraint(), []
    for _ in range(12):
        bits = np.full(2, 0xFFFFFFFF, np.uint32)
        constraint.mask(bits)
        token = int(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))[-1])
        if token == EOS:
            break
        output.append(token)
        constraint.advance((token,))
    assert text_of(output) == '{"ab": null}'


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("json", {"properties": {"foo": "bar"}}, "schema must be an object or boolean"),
        ("json", {"type": "string", "pattern": "foo**"}, r"nothing to repeat before '\*' at character 5"),
        ("json", {"items": [{"pattern": "^{2}x$"}]}, r"nothing to repeat before '\{2\}' at character 2"),
        ("json", {"type": "array", "uniqueItems": True}, "Unimplemented keys"),
        ("json", {"$ref": "#/nowhere"}, "does not exist"),
        ("json", "{", "is no JSON"),
        ("json", "[" * 5000, "is no JSON"),
        ("json", [1], "must be a JSON schema"),
        ("json", {"enum": ["x" * 2**18]}, "262158 characters long; the limit is 262144"),
        ("regex", "[a-", "ends within an escape or a class"),
        ("regex", "^+[a-z]$", "nothing to repeat before"),
        ("regex", "(" * 5000, "unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", "a?" * 10000, "20000 characters long and the limit is 16384"),
        ("regex", "", "must be a non-empty string"),
        ("regex", 5, "must be a non-empty string"),
        ("choice", [], "holds 0 texts"),
        ("choice", ["a", ""], "must hold non-empty strings"),
        ("choice", "ab", "must be a list"),
        ("grammar", "start: nowhere", 'unknown name: "nowhere"'),
        ("grammar", "start: " + "(" * 5000 + '"a"' + ")" * 5000, "too deeply nested"),
        ("grammar", "root ::= " + "(" * 5000, "GBNF"),
        ("json_object", False, "exactly one of .*; got none"),
        ("json_object", "yes", "must be true or false"),
    ],
)
def test_what_cannot_be_served_is_refused(field: str, value: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        GRAMMARS.get(StructuredOutputsParams(**{field: value}))
    assert caught.value.param == "structured_outputs"
    assert len(str(caught.value)) < 500


def test_exactly_one_structure() -> None:
    for given_ in ({}, {"json": {}, "regex": "a"}):
        with pytest.raises(RequestError, match="exactly one of json, regex, choice, grammar, json_object"):
            StructuredOutputsParams(**given_)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="must be StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]


def test_long_chains_do_not_overflow_the_stack() -> None:
    links = 1500
    chain = {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(links)}
    schema = {"$defs": {**chain, f"d{links}": {}}, "$ref": "#/$defs/d0"}
    rules = "".join(f'r{i}: "a" r{i + 1}\n' for i in range(4000))
    assert GRAMMARS.get(StructuredOutputsParams(json=schema))
    assert GRAMMARS.get(StructuredOutputsParams(grammar=f'start: r0\n{rules}r4000: "b"\n'))


def test_who_waits_too_long_is_told_and_the_grammar_is_kept() -> None:
    class Slow(Grammars):
        def _compile(self, wanted: StructuredOutputsParams) -> Grammar:
            time.sleep(0.3)
            return super()._compile(wanted)

    def prepare() -> Vocabulary:  # takes longer than a grammar may
        time.sleep(0.15)
        return VOCABULARY

    grammars, wanted = Slow(prepare, compile_seconds=0.1), StructuredOutputsParams(regex="a+")
    with pytest.raises(RequestError, match=r"not compiled within 0\.1 seconds"):
        grammars.get(wanted)

    async def wait() -> None:
        with pytest.raises(RequestError, match="not compiled within"):
            await grammars.ready(wanted)
        await asyncio.sleep(0.4)
        await grammars.ready(wanted)
        with pytest.raises(RequestError, match="escape or a class"):
            await GRAMMARS.ready(StructuredOutputsParams(regex="["))

    asyncio.run(wait())
    assert grammars.get(wanted) is grammars.get(StructuredOutputsParams(regex="a+"))
    assert Grammars(prepare, compile_seconds=0.1).get(wanted)


def test_a_model_without_an_end_is_refused() -> None:
    endless = Vocabulary(VOCABULARY.tokens, VOCABULARY.special_ids, (), encode)
    with pytest.raises(RequestError, match="end-of-sequence"):
        Grammars(lambda: endless).get(StructuredOutputsParams(regex="a"))


def test_a_limit_reached_on_the_way_is_an_error_of_the_request() -> None:
    limits = llguidance.LLParserLimits(max_lexer_states=40, verbose_errors=False)
    grammar = Grammars(lambda: VOCABULARY, limits=limits).get(StructuredOutputsParams(regex="(a|b)*a(a|b){12}"))
    constraint, rng = grammar.constraint(), random.Random(1)
    for _ in range(60):
        bits = np.full(2, 0xFFFFFFFF, np.uint32)
        constraint.mask(bits)
        constraint.advance((rng.choice(encode("ab")),))
    assert constraint.error
    assert not bits.any()
    constraint.rollback(60)
