"""Chats become exactly the ids that transformers makes of them, and odd messages a clear error or a prompt."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import MissingFileError, RequestError
from jaxserve.tokenizer import load_tokenizer
from tests.tokenizer.samples import byte_level_metadata, made_from, smollm2, smollm2_metadata

USER = {"role": "user", "content": "What is the weather in 東京?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "東京"}}}
ANSWER = {"role": "tool", "tool_call_id": "c1", "content": "rain"}
CHATS = [
    [USER],
    [{"role": "system", "content": "Be brief."}, USER],
    [USER, {"role": "assistant", "content": "Rain."}, {"role": "user", "content": " And \n tomorrow? "}],
]
TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for call in m.tool_calls %}({{ call.function.name }}:{{ call.function.arguments | tojson }}){% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}{{ extra }}"
)
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def with_template(template: str | None = TEMPLATE, **more: Any) -> tuple[Any, Any]:
    return made_from(byte_level_metadata("llama-bpe", chat_template=template, **more))


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("make", [smollm2, with_template])
def test_ids_are_those_of_transformers(make: Any, chat: list[dict[str, Any]]) -> None:
    tokenizer, hf = make()
    for options in (
        {"add_generation_prompt": True},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"tools": TOOLS},
        {"extra": "!"},
        {"chat_template": "{{ messages[-1]['content'] }}"},
    ):
        expected = hf.apply_chat_template(chat, **{"add_generation_prompt": True} | options, tokenize=True)
        assert tokenizer.apply_chat_template(chat, **options) == expected["input_ids"]


def test_bos_comes_once() -> None:
    tokenizer, _ = with_template()
    assert tokenizer.encode("x").count(tokenizer.bos_token_id) == 1
    ids = tokenizer.apply_chat_template([USER])
    assert ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.encode(tokenizer.render_chat([USER])) == ids
    assert tokenizer.encode("<s><s>x").count(tokenizer.bos_token_id) == 2
    plain, _ = with_template(ggml__add_bos_token=False)
    assert plain.encode("<s><s>x").count(plain.bos_token_id) == 2


def test_content_may_be_missing_null_or_parts() -> None:
    tokenizer, _ = with_template()
    assert tokenizer.render_chat([{"role": "user"}]) == tokenizer.render_chat([{"role": "user", "content": None}])
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert tokenizer.render_chat([{"role": "user", "content": parts}]) == "<s>[user]one\ntwo[assistant]"


@pytest.mark.parametrize("make", [smollm2, with_template])
@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}])
def test_tool_calls_without_content_are_in_the_prompt(make: Any, content: dict[str, Any]) -> None:
    tokenizer, _ = make()
    text = tokenizer.render_chat([USER, {"role": "assistant", "tool_calls": [CALL], **content}, ANSWER])
    assert "weather" in text.replace(USER["content"], "")
    assert '{"city": "東京"}' in text
    assert "rain" in text


def test_arguments_are_objects_for_the_template() -> None:
    tokenizer, _ = with_template()
    written = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "東京"}'}}
    one, other = ([USER, {"role": "assistant", "content": "hm", "tool_calls": [c]}] for c in (written, CALL))
    assert tokenizer.render_chat(one) == tokenizer.render_chat(other)
    assert '(weather:{"city": "東京"})' in tokenizer.render_chat(one)


def test_messages_are_not_changed() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    before = repr(message)
    smollm2()[0].render_chat([USER, message])
    assert repr(message) == before


def deep(levels: int) -> dict[str, Any]:
    tool: dict[str, Any] = {}
    for _ in range(levels):
        tool = {"a": tool}
    return tool


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "non-empty"),
        ("hello", "list"),
        (["hello"], r"messages\[0\] must be an object"),
        ([USER, {"content": "x"}], r"messages\[1\]\.role"),
        ([{"role": "user", "content": 5}], "content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "image_url"),
        ([{"role": "user", "content": [{"type": "text"}]}], "text must be a string"),
        ([{"role": "assistant", "tool_calls": "x"}], "tool_calls"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "tool_calls"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}], "no JSON"),
        ([{"role": "teapot", "content": "x"}], "teapots are not served"),
    ],
)
def test_malformed_messages_are_refused(messages: Any, message: str) -> None:
    refuses = "{% for m in messages %}{% if m.role == 'teapot' %}{{ raise_exception('teapots are not served') }}"
    tokenizer, _ = with_template(refuses + "{% endif %}{{ m.content + '' }}{% endfor %}")
    with pytest.raises(RequestError, match=message) as caught:
        tokenizer.render_chat(messages)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("arguments", [deep(100_000), {"a": {1, 2}}], ids=["deep", "set"])
def test_arguments_that_cannot_be_written_are_refused(arguments: dict[str, Any]) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    with pytest.raises(RequestError, match="arguments of 'f'") as caught:
        smollm2()[0].render_chat([USER, {"role": "assistant", "content": "", "tool_calls": [call]}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "options",
    [
        {"continue_final_message": True},  # and the prompt for another message
        {"tools": [deep(5000)]},
        {"chat_template": "{% if"},
        {"chat_template": "{{ undefined.name.of }}"},
        {"tokenize": True},
        {"tools": ["no object"]},
    ],
)
def test_options_that_cannot_be_rendered_are_refused(options: dict[str, Any]) -> None:
    tokenizer, _ = with_template()
    with pytest.raises(RequestError):
        tokenizer.render_chat([USER], **options)


def test_a_model_without_template_says_so() -> None:
    tokenizer, _ = with_template(None)
    assert tokenizer.chat_template is None
    with pytest.raises(RequestError, match="chat template"):
        tokenizer.render_chat([USER])
    assert tokenizer.render_chat([USER], chat_template="{{ messages|length }}") == "1"


def test_a_template_for_tools_is_used_with_tools() -> None:
    more = {"chat_templates": ["tool_use"], "chat_template__tool_use": "with tools"}
    tokenizer, _ = with_template("plain", **more)
    assert tokenizer.chat_template == "plain"
    assert tokenizer.render_chat([USER]) == "plain"
    assert tokenizer.render_chat([USER], tools=TOOLS) == "with tools"
    assert tokenizer.render_chat([USER], tools=[]) == "plain"


def test_a_template_file_replaces_the_models(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("file {{ messages|length }}")
    metadata = byte_level_metadata("gpt-2", chat_template="old")
    assert load_tokenizer(None, metadata, str(tmp_path / "t.jinja")).render_chat([USER]) == "file 1"
    assert load_tokenizer(None, metadata, "text {{ messages|length }}").render_chat([USER]) == "text 1"
    with pytest.raises(MissingFileError, match=r"no\.jinja"):
        load_tokenizer(None, metadata, str(tmp_path / "no.jinja"))


def test_surrogates_in_a_chat_do_not_break_it() -> None:
    tokenizer, _ = smollm2()
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "emoji \ud83d"}])
    assert "emoji �" in tokenizer.decode(ids)


def test_one_tokenizer_serves_many_threads() -> None:
    tokenizer, _ = made_from(smollm2_metadata())
    texts = [f"{i} 🦙 日本 " * 20 for i in range(64)]

    def work(text: str) -> tuple[list[int], list[int], str]:
        ids = tokenizer.encode(text)
        chat = tokenizer.apply_chat_template([{"role": "user", "content": text}])
        return ids, chat, tokenizer.decode(ids)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, texts)) == [work(text) for text in texts]
    assert [work(text)[2] for text in texts] == texts
