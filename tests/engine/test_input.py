"""Requests are tokenised, checked against the model and given seeds before the engine sees them."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import numpy as np
import pytest

from jaxserve.engine.input import InputProcessor
from jaxserve.errors import RequestError
from jaxserve.models.config import ModelConfig
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams, StructuredOutputsParams
from jaxserve.structured import step_mask
from tests.tokenizer.samples import byte_level_metadata, made_from, sentencepiece, smollm2

TOKENIZER, _ = made_from(byte_level_metadata("gpt-2"))
VOCAB = TOKENIZER.vocab_size
MAX_LEN = 32


def processor(
    *, seed: int = 0, eos: tuple[int, ...] = (2,), tokenizer: Any = TOKENIZER, vocab: int = VOCAB
) -> InputProcessor:
    sizes: dict[str, Any] = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_layers": 1,
        "num_heads": 1,
        "num_kv_heads": 1,
    }
    config = ModelConfig("llama", vocab, **sizes, head_dim=8, max_position=MAX_LEN, eos_token_ids=eos)
    return InputProcessor(tokenizer, config, MAX_LEN, seed)


def prepare(prompt: Any = "hello", /, *, routing: dict[str, Any] | None = None, **params: Any) -> list[Request]:
    return processor().prepare("r", prompt, SamplingParams(**params), **routing or {})


def refused(prompt: Any = "hello", /, **params: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        prepare(prompt, **params)
    return caught.value


def test_text_and_its_ids_are_the_same_request() -> None:
    (text,), (ids,) = prepare("hello"), prepare(TOKENIZER.encode("hello"))
    assert text.prompt == ids.prompt == TOKENIZER.encode("hello")
    assert text.id == "r"
    assert text.fork_of is None
    assert text.constraint is None


def test_a_text_that_cannot_fit_is_not_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = MAX_LEN * TOKENIZER.longest_token
    assert "prompt contains" in str(refused("!" * limit))
    monkeypatch.setattr(type(TOKENIZER), "encode", None)
    error = refused("!" * (limit + 1))
    assert error.param == "prompt"
    assert f"{limit + 1} characters" in str(error)


def test_routing_is_handed_on() -> None:
    (request,) = prepare(routing={"priority": -3, "cache_salt": "mine", "adapter": b"key"})
    assert (request.priority, request.cache_salt, request.adapter) == (-3, "mine", b"key")


@pytest.mark.parametrize("prompt", ["", [], ()])
def test_an_empty_prompt_is_refused(prompt: Any) -> None:
    error = refused(prompt)
    assert error.param == "prompt"
    assert "empty" in str(error)


def test_a_tokenizer_that_adds_bos_answers_an_empty_text() -> None:
    (request,) = processor(tokenizer=sentencepiece()[0]).prepare("r", "", SamplingParams())
    assert request.prompt == [1]


@pytest.mark.parametrize("prompt", [[1, 2.0], [True], ["a"], [None], [[1]], b"abc", 5, None, {"a": 1}])
def test_a_prompt_of_another_type_is_refused(prompt: Any) -> None:
    error = refused(prompt)
    assert error.param == "prompt"
    assert "string or a list of token ids" in str(error)


@pytest.mark.parametrize("token", [-1, VOCAB, 10**30])
def test_ids_outside_the_vocabulary_are_refused(token: int) -> None:
    for error, param in (
        (refused([1, token]), "prompt"),
        (refused(stop_token_ids=(token,)), "stop_token_ids"),
        (refused(logit_bias={token: 1.0}), "logit_bias"),
        (refused(allowed_token_ids=(5, token)), "allowed_token_ids"),
    ):
        assert error.param == param
        assert str(token) in str(error)
        assert str(VOCAB - 1) in str(error)


def test_text_that_the_model_has_no_embedding_for_is_refused() -> None:
    with pytest.raises(RequestError, match="outside the vocabulary"):
        processor(vocab=10).prepare("r", "z", SamplingParams())


def test_a_prompt_must_leave_room_for_a_token() -> None:
    (request,) = prepare([5] * (MAX_LEN - 1))
    assert request.max_total == MAX_LEN
    message = str(refused([5] * MAX_LEN))
    assert f"maximum context length is {MAX_LEN} tokens" in message
    assert f"your prompt contains {MAX_LEN} input tokens" in message


@pytest.mark.parametrize(
    ("max_tokens", "max_total"), [(3, 13), (22, 32), (10_000_000, 32), (2**53 - 1, 32), (None, 32)]
)
def test_output_is_limited_to_what_is_left_of_the_context(max_tokens: int | None, max_total: int) -> None:
    assert prepare([5] * 10, max_tokens=max_tokens)[0].max_total == max_total


def test_surrogates_in_a_prompt_count_as_the_replacement_character() -> None:
    assert prepare("\udcf0")[0].prompt == TOKENIZER.encode("�")


@pytest.mark.parametrize(
    ("routing", "param"),
    [
        ({"cache_salt": "x" * 129}, "cache_salt"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"priority": "high"}, "priority"),
        ({"priority": True}, "priority"),
    ],
)
def test_malformed_routing_is_refused(routing: dict[str, Any], param: str) -> None:
    assert refused(routing=routing).param == param


def test_the_longest_salt_is_accepted() -> None:
    assert prepare(routing={"cache_salt": "x" * 128})[0].cache_salt == "x" * 128


def test_end_tokens_of_model_and_tokenizer_stop_together() -> None:
    assert prepare()[0].stop_ids == {1, 2}
    assert prepare(stop_token_ids=(7,))[0].stop_ids == {1, 2, 7}
    assert prepare(stop_token_ids=(7,), ignore_eos=True)[0].stop_ids == {7}
    assert prepare(ignore_eos=True)[0].stop_ids == frozenset()


def test_several_completions_are_siblings() -> None:
    requests = prepare(n=3, seed=5, temperature=0.5)
    assert [r.id for r in requests] == ["r-0", "r-1", "r-2"]
    assert [r.fork_of for r in requests] == [None, requests[0], requests[0]]
    assert all(r.params == SamplingParams(seed=5, temperature=0.5) for r in requests)
    assert len({r.seed for r in requests}) == 3
    assert requests[0].seed == prepare(seed=5)[0].seed
    assert [r.seed for r in requests] == [r.seed for r in prepare(n=3, seed=5)]


@pytest.mark.parametrize("seed", [0, 1, -2, -(2**63), 2**63 - 1, 2**64 - 1])
def test_every_seed_is_a_seed(seed: int) -> None:
    first, second = prepare(seed=seed)[0].seed, prepare(seed=seed)[0].seed
    assert first == second
    assert 0 <= first < 2**64


def test_seeds_tell_requests_apart() -> None:
    assert len({prepare(seed=seed)[0].seed for seed in (0, 1, -2, -3, 2**63)}) == 5


def test_requests_without_seed_differ() -> None:
    make = processor()
    with ThreadPoolExecutor(4) as pool:
        drawn = pool.map(lambda _: make.prepare("r", "hi", SamplingParams(n=2)), range(50))
    assert len({request.seed for requests in drawn for request in requests}) == 100


def test_drawn_seeds_follow_from_the_engines() -> None:
    def drawn(engine_seed: int) -> list[int]:
        make = processor(seed=engine_seed)
        return [make.prepare("r", "hi", SamplingParams())[0].seed for _ in range(3)]

    assert drawn(0) == drawn(0)
    assert not set(drawn(0)) & set(drawn(1))


def legal(request: Request, vocab: int) -> set[int]:
    bits = np.full((vocab + 31) // 32, 0xFFFFFFFF, np.uint32)
    request.constraint.mask(bits)
    return {token for token in range(vocab) if bits[token // 32] >> (token % 32) & 1}


def test_siblings_have_constraints_of_their_own() -> None:
    first, second = prepare(n=2, min_tokens=2)
    assert not {1, 2} & legal(first, VOCAB)
    first.constraint.advance((5, 6))
    assert {1, 2} <= legal(first, VOCAB)
    assert not {1, 2} & legal(second, VOCAB)


def test_bad_words_are_kept_out_with_and_without_a_space_before() -> None:
    tokenizer, _ = smollm2()
    make = processor(tokenizer=tokenizer, vocab=tokenizer.vocab_size)
    (request,) = make.prepare("r", "Say it.", SamplingParams(bad_words=("Paris", "\n")))
    (plain,), (spaced,), (newline,) = map(tokenizer.encode, ("Paris", " Paris", "\n"))
    assert plain != spaced
    everything = set(range(tokenizer.vocab_size))
    assert everything - legal(request, tokenizer.vocab_size) == {plain, spaced, newline}


def test_a_bad_word_without_tokens_is_refused() -> None:
    tokenizer, _ = smollm2()
    with pytest.raises(RequestError, match="bad_words"):  # its vocabulary lacks this byte
        processor(tokenizer=tokenizer, vocab=49152).prepare("r", "x", SamplingParams(bad_words=("\x04",)))


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 3, "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["a", "日本", "x y", None]}, "minItems": 1, "maxItems": 3},
        "size": {"type": "number", "minimum": 0, "maximum": 1},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}


def sampled(request: Request, tokenizer: Any, vocab: int, rng: random.Random) -> str:
    """A random output, up to the token that ends it."""
    output: list[int] = []
    while len(output) < 300:
        mask = step_mask([(request.constraint, 0, request.drafts)], vocab)
        assert mask is not None
        legal = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        token = int(rng.choice(legal))
        if token in request.stop_ids:
            text: str = tokenizer.decode(output)
            return text
        output.append(token)
        request.constraint.advance((token,))
    raise AssertionError("the output has no end")


def test_random_outputs_of_a_real_vocabulary_satisfy_the_schema() -> None:
    tokenizer, _ = smollm2()
    inputs = processor(tokenizer=tokenizer, vocab=tokenizer.vocab_size + 7, eos=(2, 0))
    wanted = SamplingParams(structured_outputs=StructuredOutputsParams(json=SCHEMA), n=2)
    texts = set()
    for seed in range(5):
        for request in inputs.prepare("r", "x", wanted):
            texts.add(sampled(request, tokenizer, tokenizer.vocab_size + 7, random.Random(seed)))
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(texts) > 3


def test_sentencepiece_writes_no_space_that_the_grammar_does_not_know() -> None:
    tokenizer, _ = sentencepiece()
    inputs = processor(tokenizer=tokenizer, vocab=tokenizer.vocab_size)
    wanted = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["hello world", "日本"]))
    texts = {
        sampled(inputs.prepare("r", "x", wanted)[0], tokenizer, tokenizer.vocab_size, random.Random(seed))
        for seed in range(8)
    }
    assert texts == {"hello world", "日本"}


def test_a_model_s_every_end_token_ends_and_no_end_is_ignored() -> None:
    inputs = processor(eos=(1, 2))
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="A?"), ignore_eos=True)
    (request,) = inputs.prepare("r", "x", params)
    assert {1, 2} <= request.stop_ids
    with pytest.raises(RequestError, match="cannot be used"):
        inputs.prepare("r", "x", SamplingParams(structured_outputs=StructuredOutputsParams(json={"type": "nope"})))
