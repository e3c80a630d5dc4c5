"""Clients in Python: OpenAI's own, and those that build on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from tests.clients.conftest import KEY
from tests.server.fake import SCRIPT

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]

Serve = Callable[..., str]

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
HELLO: Any = [{"role": "user", "content": "hello"}]


class Person(BaseModel):
    name: str
    age: int


ANN = Person(name="Ann", age=3)
SAYS_ANN = ANN.model_dump_json()


@pytest.fixture
def openai_client(serve: Serve) -> Any:
    openai = pytest.importorskip("openai")
    return lambda says=None: openai.OpenAI(base_url=serve(says), api_key=KEY, max_retries=0)


def test_openai_parses_and_streams_structures(openai_client: Any) -> None:
    with openai_client(SAYS_ANN) as client:
        parsed = client.chat.completions.parse(model="fake-model", messages=HELLO, response_format=Person)
        assert parsed.choices[0].message.parsed == ANN
        with client.chat.completions.stream(model="fake-model", messages=HELLO, response_format=Person) as stream:
            kinds = {event.type for event in stream}
            assert stream.get_final_completion().choices[0].message.parsed == ANN
        assert {"content.delta", "content.done", "chunk"} <= kinds


def test_openai_calls_tools(openai_client: Any) -> None:
    with openai_client(CALL) as client:
        asked = {"model": "fake-model", "messages": HELLO, "tools": [TOOL]}
        parsed = client.chat.completions.parse(**asked)
        (call,) = parsed.choices[0].message.tool_calls
        assert call.function.parsed_arguments == {"city": "Paris"}
        with client.chat.completions.stream(**asked) as stream:
            for event in stream:
                assert event.type != "error"
            (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
        assert json.loads(streamed.function.arguments) == {"city": "Paris"}
        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        again = [*HELLO, parsed.choices[0].message, result]
        assert client.chat.completions.create(model="fake-model", messages=again).choices[0].finish_reason == "stop"


def test_openai_async(serve: Serve) -> None:
    openai = pytest.importorskip("openai")
    import anyio

    async def talk() -> str:
        async with openai.AsyncOpenAI(base_url=serve("Hello there"), api_key=KEY) as client:
            stream = await client.chat.completions.create(
                model="fake-model", messages=HELLO, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            assert chunks[-1].usage.completion_tokens == 11
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
            with pytest.raises(openai.AuthenticationError):
                await client.with_options(api_key="wrong").models.list()
            return text

    assert anyio.run(talk) == "Hello there"


def test_litellm(serve: Serve) -> None:
    litellm = pytest.importorskip("litellm")
    asked = {"api_base": serve("Hello there"), "api_key": KEY, "messages": HELLO}
    whole = litellm.completion(model="openai/fake-model", max_tokens=5, **asked)
    assert (whole.choices[0].message.content, whole.usage.completion_tokens) == ("Hello", 5)
    chunks = litellm.completion(model="hosted_vllm/fake-model", stream=True, **asked)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello there"
    text = litellm.text_completion(
        model="text-completion-openai/fake-model", prompt="x", max_tokens=5, api_base=asked["api_base"], api_key=KEY
    )
    assert text.choices[0].text == "Hello"
    called = litellm.completion(model="openai/fake-model", tools=[TOOL], **{**asked, "api_base": serve(CALL)})
    assert json.loads(called.choices[0].message.tool_calls[0].function.arguments) == {"city": "Paris"}
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(model="openai/fake-model", temperature=-1, **asked)


def test_langchain(serve: Serve) -> None:
    langchain = pytest.importorskip("langchain_openai")
    model = langchain.ChatOpenAI(model="fake-model", base_url=serve(CALL), api_key=KEY)
    bound = model.bind_tools([TOOL])
    answer = bound.invoke("hello")
    assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("weather", {"city": "Paris"})]
    assert answer.usage_metadata["output_tokens"] == len(CALL)
    whole = None
    for chunk in bound.stream("hello"):
        whole = chunk if whole is None else whole + chunk
    assert whole.tool_calls[0]["args"] == {"city": "Paris"}
    model = langchain.ChatOpenAI(model="fake-model", base_url=serve(SAYS_ANN), api_key=KEY)
    for method in ("json_schema", "function_calling", "json_mode"):
        assert model.with_structured_output(Person, method=method).invoke("hello") == ANN
    completions = langchain.OpenAI(model="fake-model", base_url=serve("Hello there"), api_key=KEY)
    assert "".join(completions.stream("x")) == "Hello there"


def test_instructor(serve: Serve) -> None:
    instructor = pytest.importorskip("instructor")
    openai = pytest.importorskip("openai")
    url = serve(SAYS_ANN)
    for mode in ("TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA"):
        client = instructor.from_openai(
            openai.OpenAI(base_url=url, api_key=KEY, max_retries=0), mode=instructor.Mode[mode]
        )
        asked = {"model": "fake-model", "messages": HELLO, "response_model": Person}
        whole = client.chat.completions.create(**asked, max_retries=0)
        assert whole.model_dump() == ANN.model_dump()
        *_, last = client.chat.completions.create_partial(**asked)
        assert (last.name, last.age) == ("Ann", 3)


def test_lm_eval_generates(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    models = pytest.importorskip("lm_eval.models.openai_completions")
    from lm_eval.api.instance import Instance

    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    model = models.LocalCompletionsAPI(
        base_url=serve() + "/completions",
        model="fake-model",
        tokenizer_backend=None,
        tokenized_requests=False,
        num_concurrent=3,
        eos_string="<eos>",
    )
    asked = [Instance("generate_until", {}, (f"x{i}", {"until": ["time"], "max_gen_toks": 50}), 0) for i in range(5)]
    assert model.generate_until(asked) == [SCRIPT[: SCRIPT.index("time")]] * 5


@pytest.mark.parametrize("settings", [{"num_concurrent": 3}, {"batch_size": 4}, {"tokenized_requests": False}])
def test_lm_eval_scores(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settings: dict[str, Any]
) -> None:
    models = pytest.importorskip("lm_eval.models.openai_completions")
    from lm_eval.api.instance import Instance

    save_byte_tokenizer(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    model = models.LocalCompletionsAPI(
        base_url=serve() + "/completions", model="fake-model", tokenizer=str(tmp_path), **settings
    )
    # The fake holds byte 1 for the likeliest, and a byte for the less likely the larger it is.
    pairs = [("ab", " c"), ("a longer one", "\x01\x01"), ("x", "\x01y"), ("ab", " d"), ("ß", "ü")]
    if "tokenized_requests" not in settings:
        pairs.append(("", "z"))  # after EOS, which the fake does not know as a text
    asked = [Instance("loglikelihood", {}, pair, 0) for pair in pairs]
    found = model.loglikelihood(asked)
    assert [is_greedy for _, is_greedy in found] == [set(continuation) == {"\x01"} for _, continuation in pairs]
    wanted = [-sum(continuation.encode()) / 100 for _, continuation in pairs]
    assert [score for score, _ in found] == pytest.approx(wanted)


def save_byte_tokenizer(folder: Path) -> None:
    """The fake's tokenizer: a token is a byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    own = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))  # bytes that byte-level BPE shows as they are
    moved = (byte for byte in range(256) if byte not in own)
    shown = {chr(byte): byte for byte in own} | {chr(256 + i): byte for i, byte in enumerate(moved)}
    backend = Tokenizer(models.BPE({**shown, "<eos>": 256}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>").save_pretrained(folder)
