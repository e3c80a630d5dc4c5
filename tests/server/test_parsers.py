"""Answers taken apart: one result for every way of cutting them, and arguments that are always JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxserve.server.parsers import REASONING_PARSERS, TOOL_PARSERS, OutputParser, detect
from jaxserve.server.parsers.calls import arguments_of
from jaxserve.server.parsers.json_text import JsonText

TOOLS: dict[str, Any] = {
    "f": {"type": "object", "properties": {"a": {"type": "integer"}, "s": {"type": "string"}, "o": {"type": "object"}}},
    "get.it": {"type": "object", "properties": {}},
}

Result = tuple[str, str, list[tuple[str | None, str]]]


def parse(pieces: list[str], tools: str | None = None, reasoning: str | None = None, **settings: Any) -> Result:
    """(reasoning, content, calls), put together from what comes out."""
    inside = settings.pop("inside", False)
    parser = OutputParser(
        REASONING_PARSERS[reasoning].parse(inside) if reasoning else None,
        settings.pop("parse", None) or (TOOL_PARSERS[tools].parse if tools else None),
        TOOLS,
        **settings,
    )
    thought, content = "", ""
    calls: list[tuple[str | None, str]] = []
    for piece in [*map(parser.push, pieces), parser.push("", last=True)]:
        thought, content = thought + piece.reasoning, content + piece.content
        for call in piece.calls:
            if call.name is not None:
                assert call.index == len(calls)
                calls.append((call.name, ""))
            assert call.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + call.arguments)
    assert parser.num_calls == len(calls)
    return thought, content, calls


WRITTEN = {
    "hermes": [
        'Well.\n<tool_call>\n{"name": "f", "arguments": {"a": 1, "s": "日\\n🦙"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get.it", "arguments": {}}\n</tool_call>',
        '<tool_call>{"arguments": {"a": [1, 2]}, "name": "f"}</tool_call> bye',
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        '<tool_call>{"name": "f"}</tool_call>',
        'a <tool_call>{"name": "unknown", "arguments": {}}</tool_call> b',
        "a <tool_call>not JSON</tool_call> b <tool_cal",
    ],
    "granite": ['<|tool_call|>[{"name": "f", "arguments": {"a": 1}}, {"name": "get.it", "arguments": {}}]'],
    "llama3_json": [
        '{"name": "f", "parameters": {"a": 1}}; {"name": "get.it", "parameters": {}}',
        '<|python_tag|>{"name": "f", "parameters": {"a": true}}',
        '{"name": "Bob", "age": 3}',
        '{"name": "f", "age": 3} is no call',
    ],
    "mistral": [
        'Hm. [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "get.it", "arguments": {}}]',
        '[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"a": 1}[TOOL_CALLS]get.it{}',
        "[TOOL_CALLS]unknown[ARGS]{}",
    ],
    "pythonic": [
        "[f(a=1, s='it\\'s, (ok)', o={'x': [None, True]}), get.it()]",
        " [f(a=-1.5, s=Oslo)] tail",
        "[1] is a footnote",
    ],
    "qwen3_xml": [
        'So:\n<tool_call>\n<function=f>\n<parameter=a>\n12\n</parameter>\n<parameter=s>\n\n<b> "x"\n\n</parameter>\n'
        "<parameter=o>\n{'x': 1}\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=get.it>\n</function>\n</tool_call>",
        "<function=f><parameter=s>x</parameter></function> done",
        "<tool_call>\n<function=unknown>\n</function>\n</tool_call>",
    ],
    "json": [
        '```json\n[{"name": "f", "parameters": {"a": 1}}, {"name": "get.it", "arguments": {}}]\n```',
        '{"name": "f", "arguments": {"a": 1.5e3}} {"name": "get.it", "arguments": {}}',
        "just text {",
    ],
}

EXPECTED: dict[tuple[str, int], tuple[str, list[tuple[str, str]]]] = {
    ("hermes", 0): ("Well.", [("f", '{"a":1,"s":"日\\n🦙"}'), ("get.it", "{}")]),
    ("hermes", 1): ("bye", [("f", '{"a":[1,2]}')]),
    ("hermes", 2): ("", [("f", '{"a":1}')]),
    ("hermes", 3): ("", [("f", "{}")]),
    ("hermes", 4): (WRITTEN["hermes"][4], []),
    ("hermes", 5): (WRITTEN["hermes"][5], []),
    ("granite", 0): ("", [("f", '{"a":1}'), ("get.it", "{}")]),
    ("llama3_json", 0): ("", [("f", '{"a":1}'), ("get.it", "{}")]),
    ("llama3_json", 1): ("", [("f", '{"a":true}')]),
    ("llama3_json", 2): (WRITTEN["llama3_json"][2], []),
    ("llama3_json", 3): (WRITTEN["llama3_json"][3], []),
    ("mistral", 0): ("Hm.", [("f", '{"a":1}'), ("get.it", "{}")]),
    ("mistral", 1): ("", [("f", '{"a":1}'), ("get.it", "{}")]),
    ("mistral", 2): (WRITTEN["mistral"][2], []),
    ("pythonic", 0): ("", [("f", '{"a":1,"s":"it\'s, (ok)","o":{"x": [null, true]}}'), ("get.it", "{}")]),
    ("pythonic", 1): ("tail", [("f", '{"a":-1.5,"s":"Oslo"}')]),
    ("pythonic", 2): (WRITTEN["pythonic"][2], []),
    ("qwen3_xml", 0): ("So:", [("f", '{"a":12,"s":"\\n<b> \\"x\\"\\n","o":{"x": 1}}'), ("get.it", "{}")]),
    ("qwen3_xml", 1): ("done", [("f", '{"s":"x"}')]),
    ("qwen3_xml", 2): (WRITTEN["qwen3_xml"][2], []),
    ("json", 0): ("", [("f", '{"a":1}'), ("get.it", "{}")]),
    ("json", 1): ("", [("f", '{"a":1.5e3}'), ("get.it", "{}")]),
    ("json", 2): (WRITTEN["json"][2], []),
}
ALL = [(name, text) for name, texts in WRITTEN.items() for text in texts]


@pytest.mark.parametrize(("name", "number"), EXPECTED)
def test_formats(name: str, number: int) -> None:
    assert parse([WRITTEN[name][number]], name) == ("", *EXPECTED[name, number])


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@given(
    written=st.sampled_from(ALL),
    thought=st.sampled_from(["", "<think>\nso <b>\n</think>\n\n", "a</think>"]),
    reasoning=st.sampled_from([None, *REASONING_PARSERS]),
    inside=st.booleans(),
    end=st.integers(0, 300),
    cuts=st.lists(st.integers(0, 300), max_size=12) | st.just(list(range(300))),
    noise=st.lists(
        st.tuples(st.integers(0, 300), st.sampled_from(['"', "}", "]", "<", "\n", "x", "\\", ","])), max_size=2
    ),
)
@example(("hermes", WRITTEN["hermes"][0]), "", None, False, 40, [1], [])
@settings(max_examples=400)
def test_cutting_changes_nothing_and_arguments_are_json(
    written: tuple[str, str],
    thought: str,
    reasoning: str | None,
    inside: bool,
    end: int,
    cuts: list[int],
    noise: list[tuple[int, str]],
) -> None:
    """Also where the text ends anywhere, or is broken anywhere."""
    name, text = written
    text = (thought + text)[:end]
    for at, char in noise:
        text = text[:at] + char + text[at:]
    expected = parse([text], name, reasoning, inside=inside)
    assert parse(pieces_of(text, cuts), name, reasoning, inside=inside) == expected
    for _, arguments in expected[2]:
        json.loads(arguments)


def test_nothing_is_held_back_without_need() -> None:
    parser = OutputParser(None, TOOL_PARSERS["hermes"].parse, TOOLS)
    assert [parser.push(text).content for text in ("a <", "b", " <tool_c", "x", " \n")] == [
        "a",
        " <b",
        "",
        " <tool_cx",
        "",
    ]
    assert parser.push("", last=True).content == " \n"
    parser = OutputParser(None, TOOL_PARSERS["hermes"].parse, TOOLS)
    parser.push('<tool_call>{"name": "f", "arguments": ')
    pieces = [parser.push(text).calls for text in ('{"s"', ': "lo', "ng", '", ', '"a": 1', "}")]
    assert [[call.arguments for call in calls] for calls in pieces] == [
        ["{"],
        ['"s":"lo'],
        ["ng"],
        ['"'],
        [',"a":1'],
        ["}"],
    ]
    parser = OutputParser(None, TOOL_PARSERS["qwen3_xml"].parse, TOOLS)
    parser.push("<function=f><parameter=s>\nab")
    assert [call.arguments for call in parser.push("cd\n").calls] == ["cd"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name": "f", "arguments": {"a": 1, "s": "x', '{"a":1,"s":"x"}'),
        ('{"name": "f", "arguments": {"a": -', '{"a":-0}'),
        ('{"name": "f", "arguments": {"a": 1, "s', '{"a":1}'),
        ('{"name": "f", "arguments": {"o": {"x": [tr', '{"o":{"x":[true]}}'),
        ('{"name": "f", "arguments": {"s": "\\ud83e\\ud', '{"s":"\\ufffd"}'),
        ('{"name": "f", "argum', "{}"),
        ('{"name": "f", "arguments": {"a": 1]}} and so on', '{"a":1}'),
        ('{"name": "f", "arguments": {"a": 01}}', '{"a":0}'),
        ('{"name": "f", "arguments": {"s": "a\nb\\d", "a": True,}}', '{"s":"a\\nb\\\\d","a":true}'),
    ],
)
def test_arguments_are_closed_and_mended(text: str, expected: str) -> None:
    assert parse(["<tool_call>" + text], "hermes")[2] == [("f", expected)]


def test_one_call_where_no_more_are_wanted() -> None:
    assert parse([WRITTEN["hermes"][0]], "hermes", max_calls=1)[2] == [EXPECTED["hermes", 0][1][0]]


def test_a_named_call_is_all_there_is() -> None:
    assert parse(['\n{"a": 1} x'], parse=arguments_of("f")) == ("", "", [("f", '{"a":1}')])
    assert parse([], parse=arguments_of("f")) == ("", "", [("f", "{}")])


@pytest.mark.parametrize(
    ("name", "inside", "text", "expected"),
    [
        ("deepseek_r1", True, "\nhm\n</think>\n\nyes", ("hm", "yes")),
        ("deepseek_r1", True, "<think>\nhm", ("hm", "")),
        ("deepseek_r1", False, "yes", ("", "yes")),
        ("qwen3", False, "<think>\nhm\n</think>\n\nyes <think>no</think>", ("hm", "yes <think>no</think>")),
        ("qwen3", False, " yes</think>", ("", " yes</think>")),
        ("think", False, "a <think>b</think> c <think>d", ("bd", "a c ")),
        ("think", True, "b</think>c", ("b", "c")),
    ],
)
def test_reasoning(name: str, inside: bool, text: str, expected: tuple[str, str]) -> None:
    assert parse([text], None, name, inside=inside) == (*expected, [])


def test_where_an_answer_begins() -> None:
    begins = {name: parser.begins_inside for name, parser in REASONING_PARSERS.items()}
    assert all(inside("<|im_start|>assistant\n<think>\n") for inside in begins.values())
    assert [name for name, inside in begins.items() if inside("assistant\n")] == ["deepseek_r1"]
    assert not any(inside("<think>\n\n</think>\n\n") for inside in begins.values())


def test_formats_are_known_by_the_chat_template() -> None:
    assert detect("{% if tools %}<tool_call>{% endif %}") == "hermes"
    assert detect("<tool_call>\n<function=example>") == "qwen3_xml"
    assert detect("[AVAILABLE_TOOLS] [TOOL_CALLS]") == "mistral"
    assert detect("{{ messages }}") is detect(None) is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(value=json_values, ascii_only=st.booleans(), indent=st.sampled_from([None, 1]), end=st.integers(0, 400))
@settings(max_examples=200)
def test_json_comes_through_and_every_beginning_is_closed(value: Any, ascii_only: bool, indent: Any, end: int) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    whole = JsonText()
    assert whole.push(text) == len(text)
    closed = whole.close()
    assert json.loads(closed) == value
    part = JsonText()
    part.push(text[:end])
    assert not part.failed
    if beginning := part.pull() + part.close():
        json.loads(beginning)
