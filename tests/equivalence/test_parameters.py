"""Every sampling parameter, from a user's request to its text, against an oracle in plain numpy.

The oracle takes the model's logits after each prefix and the noise of the place, and does all else by itself. Requests
of all parameters run at once, with several completions, streamed or not, and with further constraints on their tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from jaxserve.engine.output import OutputProcessor
from jaxserve.outputs import CompletionOutput, RequestOutput
from jaxserve.request import FinishReason, Request
from jaxserve.sampling import split_seeds
from jaxserve.sampling.sampler import noise
from jaxserve.sampling_params import SamplingParams
from tests.engine.tiny import TOKENIZER, start_tiny
from tests.equivalence.harness import CONTEXT, MODEL, params
from tests.models.dense import all_logits

V = MODEL.vocab_size
PROMPT = [7, 12, 3, 33, 12, 41]
LENGTH = 14

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.2},
    "top_k, top_p and min_p": {"temperature": 1.4, "top_k": 12, "top_p": 0.9, "min_p": 0.03},
    "presence": {"temperature": 0, "presence_penalty": 2.0},
    "frequency": {"temperature": 0, "frequency_penalty": 1.5},
    "repetition": {"temperature": 0, "repetition_penalty": 2.5},
    "all penalties": {"presence_penalty": 0.5, "frequency_penalty": -0.3, "repetition_penalty": 1.3},
    "logit_bias": {"temperature": 0, "logit_bias": {5: 6.0, 9: -100}},
    "allowed_token_ids": {"allowed_token_ids": (4, 8, 15, 16, 23, 42)},
    "bad_words": {"temperature": 0, "bad_words": ("'", "8", '""')},
    "stop_token_ids": {"temperature": 1.5, "stop_token_ids": (4, 8, 15, 16, 23, 42)},
    "min_tokens": {"temperature": 1.5, "stop_token_ids": (4, 8, 15, 16, 23, 42), "min_tokens": 6},
    "ignore_eos": {"temperature": 1.5, "ignore_eos": True},
    "stop": {"temperature": 1.5, "stop": ("A", "B", "C", "D", "E", "5", "67")},
    "stop, included": {"temperature": 1.5, "stop": ("A", "B", "C", "D", "E"), "include_stop_str_in_output": True},
    "stop after min_tokens": {"temperature": 1.5, "stop": ("A", "B", "C", "D", "E", "5"), "min_tokens": 5},
    "logprobs": {"logprobs": 4},
    "prompt_logprobs": {"prompt_logprobs": 2, "logprobs": 0},
    "max_tokens": {"max_tokens": 3},
}


@cache
def raw_logits(tokens: tuple[int, ...]) -> NDArray[np.float64]:
    return all_logits(params(), MODEL, tokens)[-1].astype(np.float64)


def changed(request: Request, output: list[int]) -> NDArray[np.float64]:
    """What the next token is the argmax of."""
    p, x = request.params, raw_logits((*request.prompt, *output)).copy()
    for token in {*request.prompt, *output}:
        x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
    for token in set(output):
        x[token] -= p.presence_penalty + p.frequency_penalty * output.count(token)
    for token, bias in p.logit_bias.items():
        x[token] += bias
    x[[token for token in range(V) if not is_legal(token, request, output)]] = -np.inf
    if p.temperature == 0:
        return x
    x /= p.temperature
    likely = np.exp(x - x.max())
    x[likely < p.min_p] = -np.inf
    if p.top_k > 0:
        x[x < np.sort(x)[::-1][p.top_k - 1]] = -np.inf
    order = np.argsort(-x)
    mass = np.cumsum(np.exp(x[order] - x.max()) / np.exp(x - x.max()).sum())
    x[order[1:][mass[:-1] >= p.top_p]] = -np.inf
    position = jnp.array([len(request.prompt) + len(output)])
    seeds = jnp.asarray(split_seeds(np.array([request.seed], np.uint64)))
    return x + np.asarray(noise(seeds, position, V))[0]


def is_legal(token: int, request: Request, output: list[int]) -> bool:
    p = request.params
    after = [*output, token]
    if any(after[-len(ids) :] == ids for ids in spelled(p.bad_words)):
        return False
    if p.allowed_token_ids is not None and token not in p.allowed_token_ids:
        return False
    return not (token in request.stop_ids and len(output) < p.min_tokens)


def spelled(words: Iterable[str]) -> list[list[int]]:
    """Words as the model writes them; it has no token for a space."""
    return [TOKENIZER.encode(word, add_special_tokens=False) for word in words]


def expected(request: Request) -> tuple[CompletionOutput, int | None]:
    """The completion, and after how many tokens it hangs by less than a rounding."""
    p, tokens, text = request.params, list[int](), ""
    unsure = None
    reason, why = "length", None
    while len(tokens) < (p.max_tokens or CONTEXT) and len(tokens) < request.max_total - len(request.prompt):
        scores = changed(request, tokens)
        best, second = np.sort(scores)[::-1][:2]
        if best - second < 1e-3 and unsure is None:
            unsure = len(tokens)
        tokens.append(int(scores.argmax()))
        if tokens[-1] in request.stop_ids:
            reason, why = "stop", tokens[-1] if tokens[-1] in p.stop_token_ids else None
            text += TOKENIZER.decode(tokens[-1:]) if p.include_stop_str_in_output else ""
            break
        text += TOKENIZER.decode(tokens[-1:])
        ends = [(at, stop) for stop in p.stop for at in range(len(text)) if text.startswith(stop, at)]
        armed = [(at, stop) for at, stop in ends if at + len(stop) > p.min_tokens]  # a token is a character here
        if armed:
            at, stop = min(armed)
            reason, why = "stop", stop
            text = text[: at + len(stop) * p.include_stop_str_in_output]
            break
    return CompletionOutput(0, text, tokens, finish_reason=reason, stop_reason=why), unsure


def serve(asked: list[SamplingParams], *, stream: bool) -> list[tuple[list[Request], list[RequestOutput]]]:
    """All requests at once, with every output that each got."""
    started = start_tiny(config={"seed": 3}, max_rows=8)
    processor, output = started.input_processor(), OutputProcessor(TOKENIZER)
    processor._bad_word_ids = spelled  # type: ignore[method-assign]
    served: dict[str, tuple[list[Request], list[RequestOutput]]] = {}
    for number, wanted in enumerate(asked):
        requests = processor.prepare(f"r{number}", PROMPT, wanted)
        served[f"r{number}"] = (requests, [])
        output.add(f"r{number}", None, requests, stream=stream)
        started.engine.add(requests)
    while started.engine.has_work:
        outputs, ended = output.process(started.engine.step())
        for engine_id in ended:
            started.engine.finish(engine_id, FinishReason.STOP)
        for out in outputs:
            served[out.request_id][1].append(out)
    return list(served.values())


def joined(outputs: Iterable[RequestOutput], index: int) -> CompletionOutput:
    whole = CompletionOutput(index)
    for part in (part for out in outputs for part in out.outputs if part.index == index):
        whole.text += part.text
        whole.token_ids += part.token_ids
        whole.finish_reason, whole.stop_reason = part.finish_reason, part.stop_reason
        if part.logprobs is not None:
            whole.logprobs = (whole.logprobs or []) + part.logprobs
    return whole


@pytest.mark.parametrize(
    "more", [{}, {"allowed_token_ids": tuple(range(20, V)), "bad_words": ("I",)}], ids=["", "masked"]
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_every_parameter(stream: bool, more: dict[str, Any]) -> None:
    asked = [SamplingParams(**{"n": 3, "seed": 11, "max_tokens": LENGTH, **more, **case}) for case in CASES.values()]
    num_unsure = 0
    for name, (requests, outputs) in zip(CASES, serve(asked, stream=stream), strict=True):
        assert stream or len(outputs) == 1
        for index, request in enumerate(requests):
            want, unsure = expected(request)
            got = joined(outputs, index)
            if unsure is not None:
                num_unsure += 1
                assert got.token_ids[:unsure] == want.token_ids[:unsure], name
                continue
            got_logprobs, got.logprobs = got.logprobs, None
            assert got == replace(want, index=index), name
            if request.params.logprobs is not None:
                check_logprobs(request, got.token_ids, got_logprobs or [])
    assert num_unsure <= 3


def check_logprobs(request: Request, tokens: list[int], shown: list[Any]) -> None:
    """Log probabilities are those of the raw logits."""
    for at, token in enumerate(tokens):
        row = raw_logits((*request.prompt, *tokens[:at]))
        row = row - row.max() - np.log(np.exp(row - row.max()).sum())
        assert shown[at][token].logprob == pytest.approx(row[token], abs=1e-4)
        assert shown[at][token].rank == 1 + (row > row[token]).sum()
        top = sorted((entry.logprob for entry in shown[at].values()), reverse=True)[: request.params.logprobs]
        assert top == pytest.approx(np.sort(row)[::-1][: request.params.logprobs], abs=1e-4)
