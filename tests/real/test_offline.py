"""The offline API on the real model."""

from __future__ import annotations

import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.errors import RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=12)


def test_chat_answers_in_words(llm: LLM) -> None:
    (output,) = llm.chat([{"role": "user", "content": "What is the capital of France?"}], GREEDY, use_tqdm=False)
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason is None


def test_a_stop_string_cuts_the_text(llm: LLM) -> None:
    prompt = "Here is the English alphabet: ABC"
    (whole,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert "DEFGHIJ" in whole.outputs[0].text
    params = SamplingParams(temperature=0, max_tokens=12, stop="DEFGHIJ")
    (cut,) = llm.generate(prompt, params, use_tqdm=False)
    assert (cut.outputs[0].text, cut.outputs[0].stop_reason) == ("", "DEFGHIJ")


def test_outputs_come_in_the_order_of_prompts_and_seeds_repeat(llm: LLM) -> None:
    words = ["one two three four", "Once upon a time", "def main():", "The quick brown fox"] * 3
    params = [SamplingParams(temperature=1.0, max_tokens=4 + i, seed=i, ignore_eos=True) for i in range(len(words))]
    first = llm.generate(words, params, use_tqdm=False)
    again = llm.generate(words[::-1], params[::-1], use_tqdm=False)[::-1]
    assert [o.prompt for o in first] == words
    assert [len(o.outputs[0].token_ids) for o in first] == [4 + i for i in range(len(words))]
    assert [o.outputs[0].text for o in first] == [o.outputs[0].text for o in again]


def test_n_completions_differ_and_the_first_is_that_of_one(llm: LLM) -> None:
    params = SamplingParams(n=4, temperature=1.2, max_tokens=8, seed=3)
    (many,) = llm.generate("My favourite colour is", params, use_tqdm=False)
    (one,) = llm.generate(
        "My favourite colour is", SamplingParams(temperature=1.2, max_tokens=8, seed=3), use_tqdm=False
    )
    assert [c.index for c in many.outputs] == [0, 1, 2, 3]
    assert len({c.text for c in many.outputs}) > 1
    assert many.outputs[0].text == one.outputs[0].text


def test_without_a_seed_answers_differ(llm: LLM) -> None:
    outputs = llm.generate(["Hello"] * 5, SamplingParams(temperature=1.0, max_tokens=8), use_tqdm=False)
    assert len({o.outputs[0].text for o in outputs}) > 1


def test_constraints_and_penalties_work_on_a_real_vocabulary(llm: LLM) -> None:
    digits = llm.tokenizer.encode("0123456789")
    params = SamplingParams(temperature=1.0, max_tokens=10, allowed_token_ids=tuple(digits), ignore_eos=True)
    (numbers,) = llm.generate("The number is", params, use_tqdm=False)
    assert numbers.outputs[0].text.isdigit()
    (plain,) = llm.generate("Once upon a time", GREEDY, use_tqdm=False)
    word = plain.outputs[0].text.split()[3]
    bad = SamplingParams(temperature=0, max_tokens=12, bad_words=(word,))
    (without,) = llm.generate("Once upon a time", bad, use_tqdm=False)
    assert word not in without.outputs[0].text.split()
    penalised = SamplingParams(temperature=0, max_tokens=30, repetition_penalty=1.5, ignore_eos=True)
    (varied,) = llm.generate("La la la la la la", penalised, use_tqdm=False)
    assert len(set(varied.outputs[0].token_ids)) > 24


def test_a_repeated_prompt_is_cached_but_for_its_last_token(llm: LLM) -> None:
    prompt = llm.tokenizer.encode("All happy families are alike; each unhappy family is unhappy in its own way. " * 6)
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=1)
    cold, warm = (llm.generate(prompt, params, use_tqdm=False)[0] for _ in range(2))
    assert warm.num_cached_tokens >= len(prompt) - 16
    assert warm.num_cached_tokens <= len(prompt) - 1
    assert cold.outputs[0].token_ids == warm.outputs[0].token_ids
    for a, b in zip(cold.outputs[0].logprobs or [], warm.outputs[0].logprobs or [], strict=True):
        assert next(iter(a.values())).logprob == pytest.approx(next(iter(b.values())).logprob, abs=1e-3)


def test_special_tokens_are_shown_as_the_tokenizer_decodes_them(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, skip_special_tokens=False, ignore_eos=True)
    for prompt in ("Hello world<|im_end|>", "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", " a"):
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        ids = output.outputs[0].token_ids
        assert output.outputs[0].text == llm.tokenizer.decode(ids, skip_special_tokens=False)
        assert llm.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False) == prompt


def test_a_templated_text_is_the_chat_it_was_made_of(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    (chat,) = llm.chat(messages, GREEDY, use_tqdm=False)
    (text,) = llm.generate(llm.tokenizer.render_chat(messages), GREEDY, use_tqdm=False)
    assert chat.prompt_token_ids == text.prompt_token_ids == llm.tokenizer.apply_chat_template(messages)
    assert chat.outputs[0].text == text.outputs[0].text


def test_a_bad_prompt_fails_the_call_and_leaves_nothing_behind(llm: LLM) -> None:
    with pytest.raises(RequestError, match="empty"):
        llm.generate(["fine", ""], GREEDY, use_tqdm=False)
    assert not llm.engine.has_work
    assert llm.generate("fine", GREEDY, use_tqdm=False)[0].finished


def test_nothing_was_compiled_while_serving(llm: LLM) -> None:
    """Runs last in this file, after every kind of request."""
    assert llm.stats().runtime_compiles_total == 0
    assert llm.stats().num_free_blocks == llm.stats().num_blocks
