"""On the CPU with native kernels a request's numbers are the same, bit for bit, whoever shares its steps."""

from __future__ import annotations

import numpy as np

from jaxserve import LLM, SamplingParams
from jaxserve.outputs import RequestOutput
from tests.real.conftest import SETTINGS


def numbers(output: RequestOutput) -> tuple[list[int], list[float]]:
    completion = output.outputs[0]
    assert completion.logprobs is not None
    chosen = [top[token].logprob for token, top in zip(completion.token_ids, completion.logprobs, strict=True)]
    return list(completion.token_ids), chosen


def test_tokens_and_logprobs_alone_equal_those_in_a_batch(llm: LLM, caches: dict[str, str]) -> None:
    """Prompts of many lengths: in the batch they are cut into chunks at other places, and decode in other buckets.

    Without prefix cache, which would hand the solo runs what the batch has computed. ``llm`` comes first: it fills the
    cache of programs.
    """
    rng = np.random.default_rng(0)
    prompts = [rng.integers(100, 40000, size).tolist() for size in (20, 150, 7, 64, 300, 33, 1, 90)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)
    with LLM("smollm2-135m", enable_prefix_caching=False, **SETTINGS, **caches) as plain:
        together = plain.generate(prompts, params, use_tqdm=False)
        for prompt, output in zip(prompts, together, strict=True):
            assert numbers(plain.generate([prompt], params, use_tqdm=False)[0]) == numbers(output)
