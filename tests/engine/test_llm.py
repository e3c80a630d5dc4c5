"""The offline API goes on after a step that failed or was interrupted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxserve.engine.llm import LLM
from jaxserve.errors import ConfigError, EngineDeadError, RequestError
from jaxserve.runner import Runner, StepHandle
from jaxserve.sampling_params import SamplingParams
from tests.engine.tiny import greedy, start_tiny

PROMPTS = [list(range(4, 20)), list(range(30, 37))]


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> LLM:
    monkeypatch.setattr("jaxserve.engine.llm.start", lambda config: start_tiny())
    return LLM("tiny")


def answers(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, greedy(20), use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "length"]
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("fault", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize(("owner", "name"), [(Runner, "forward"), (Runner, "sample"), (StepHandle, "result")])
@pytest.mark.parametrize("at", [0, 2])
def test_a_failed_step_leaves_an_empty_engine(
    llm: LLM, owner: type, name: str, at: int, fault: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = getattr(owner, name), 0

    def failing(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > at:
            raise fault
        return original(*args)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, failing)
        with pytest.raises(fault):
            llm.generate(PROMPTS, greedy(20), use_tqdm=False)
    stats = llm.stats()
    assert not llm.engine.has_work
    assert stats.num_free_blocks == stats.num_blocks
    # Had the failed step's blocks stayed in the prefix cache, this would read KV that was never written.
    got = answers(llm)
    assert llm.stats().prefix_hits_total == 0
    assert got == answers(LLM("tiny"))


def test_an_answer_ended_by_a_stop_string_leaves_nothing_behind(llm: LLM) -> None:
    text = llm.generate(PROMPTS[0], greedy(20), use_tqdm=False)[0].outputs[0].text
    stop = text[5:8]
    cut = llm.generate(PROMPTS[0], greedy(20, stop=stop), use_tqdm=False)[0].outputs[0]
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (text[: text.index(stop)], "stop", stop)
    assert not llm.engine.has_work
    assert llm.stats().num_free_blocks == llm.stats().num_blocks


def test_log_probabilities_of_what_was_sampled_from_add_up_without_the_rest(llm: LLM) -> None:
    params = SamplingParams(
        n=2, max_tokens=6, temperature=0.7, top_k=3, seed=5, logprobs=4, logprobs_mode="processed_logprobs"
    )
    raw = SamplingParams(n=2, max_tokens=6, temperature=0.7, top_k=3, seed=5, logprobs=4, detokenize=False)
    one, other = (llm.generate(PROMPTS[0], asked, use_tqdm=False)[0] for asked in (params, raw))
    for processed, plain in zip(one.outputs, other.outputs, strict=True):
        assert (processed.token_ids, plain.text) == (plain.token_ids, "")
        assert processed.logprobs is not None
        assert plain.logprobs is not None
        for entries, token in zip(processed.logprobs, processed.token_ids, strict=True):
            likely = {id: np.exp(entry.logprob) for id, entry in entries.items()}
            assert sum(likely.values()) == pytest.approx(1, abs=1e-4)
            assert sum(chance > 0 for chance in likely.values()) == 3
            assert likely[token] > 0
        assert sum(np.exp(entry.logprob) for entry in plain.logprobs[0].values()) < 1


def test_embeddings_have_the_length_and_the_size_that_are_asked(llm: LLM) -> None:
    whole, again = llm.embed([*PROMPTS[:1], PROMPTS[0]], pooling="mean", normalize=False, use_tqdm=False)
    assert whole.embedding.shape == (llm.model_config.hidden_size,)
    assert np.array_equal(whole.embedding, again.embedding)
    (short,) = llm.embed(PROMPTS[0], pooling="mean", dimensions=8, use_tqdm=False)
    head = whole.embedding[:8]
    np.testing.assert_allclose(short.embedding, head / np.linalg.norm(head), rtol=1e-5)
    for settings in ({"dimensions": 0}, {"dimensions": 10**6}, {"pooling": "max"}):
        with pytest.raises(RequestError, match=next(iter(settings))):
            llm.embed(PROMPTS, **settings)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="cannot be paired"):
        llm.score(["a", "b"], ["c"])
    with pytest.raises(RequestError, match="max_tokens"):
        SamplingParams(max_tokens=0)
    (nothing,) = llm.generate(PROMPTS[0], SamplingParams(max_tokens=0, prompt_logprobs=1, n=2), use_tqdm=False)
    assert [(out.text, out.token_ids, out.finish_reason) for out in nothing.outputs] == [("", [], "length")] * 2
    assert nothing.prompt_logprobs is not None
    assert len(nothing.prompt_logprobs) == len(PROMPTS[0])


def test_a_chat_template_is_told_of_tools(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    message = [{"role": "user", "content": "x"}]
    with pytest.raises(RequestError, match="knows none"):
        llm.chat(message, greedy(1), tools=tools, use_tqdm=False)
    told: list[Any] = []

    def render(self: Any, messages: Any, **options: Any) -> list[int]:
        told.append(options["tools"])
        return PROMPTS[0]

    monkeypatch.setattr(type(llm.tokenizer), "chat_template", "{{ tools }}")
    monkeypatch.setattr(type(llm.tokenizer), "apply_chat_template", render)
    llm.chat(message, greedy(1), tools=tools, use_tqdm=False)
    llm.chat(message, greedy(1), use_tqdm=False)
    assert told == [tools, None]


def test_after_a_shutdown_it_says_so(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Runner] = []
    monkeypatch.setattr(type(llm.engine.runner), "close", lambda self: closed.append(self))
    llm.shutdown()
    llm.shutdown()
    assert len(closed) == 1
    for use in (lambda: llm.generate(PROMPTS, greedy(1)), llm.stats):
        with pytest.raises(EngineDeadError, match="shut down"):
            use()
    with pytest.raises(AttributeError, match="'LLM' object has no attribute 'engin'"):
        llm.engin  # noqa: B018


@pytest.mark.parametrize("prompts", [None, 5, {"prompt": "x"}])
def test_prompts_of_a_wrong_type_are_refused(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError, match="prompts must be"):
        llm.generate(prompts)


@pytest.mark.parametrize("params", [{"max_tokens": 3}, 5, ["x"]])
def test_parameters_of_a_wrong_type_are_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(RequestError, match="sampling_params must be"):
        llm.generate("x", params)


def test_a_priority_that_would_not_count_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="priority"):
        llm.generate(PROMPTS, greedy(1), priority=[0, 1], use_tqdm=False)
    assert len(llm.generate(PROMPTS, greedy(1), priority=[0, 0], use_tqdm=False)) == 2


@pytest.mark.parametrize("model", [None, "", 5])
def test_a_model_that_is_no_name_is_refused(model: object) -> None:
    with pytest.raises(ConfigError, match="model must be"):
        LLM(model)  # type: ignore[arg-type]
