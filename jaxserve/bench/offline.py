"""This engine without a server: how much it generates of a data set, and how long a batch takes."""

from __future__ import annotations

import time
from typing import Any

from jaxserve.bench.datasets import make_samples
from jaxserve.bench.options import DatasetOptions, LatencyOptions
from jaxserve.bench.records import percentile
from jaxserve.bench.workloads import Text, corpus
from jaxserve.config import EngineConfig
from jaxserve.engine import LLM
from jaxserve.errors import ConfigError
from jaxserve.sampling_params import SamplingParams

__all__ = ["PERCENTILES", "measure_latency", "measure_throughput"]

PERCENTILES = (10, 25, 50, 75, 90, 99)


def measure_throughput(config: EngineConfig, options: DatasetOptions) -> dict[str, Any]:
    """Generate for all of a data set at once; seconds, counts and rates.

    ConfigError: the data set cannot be used. RequestError: a prompt does not fit the model.
    """
    if options.dataset_name == "trace":
        raise ConfigError("--dataset-name trace has arrival times, which need a server: see 'jaxserve bench serve'.")
    with LLM(**config.flat()) as llm:
        samples = make_samples(options, llm.tokenizer, config.model.seed)
        params = [SamplingParams(temperature=0.0, max_tokens=s.max_tokens, ignore_eos=True) for s in samples]
        _warm_up(llm)
        began = time.perf_counter()
        outputs = llm.generate([sample.prompt for sample in samples], params)
        seconds = time.perf_counter() - began
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {
        "num_requests": len(outputs),
        "elapsed_time": seconds,
        "total_input_tokens": num_prompt,
        "total_output_tokens": num_output,
        "requests_per_second": len(outputs) / seconds,
        "output_tokens_per_second": num_output / seconds,
        "tokens_per_second": (num_prompt + num_output) / seconds,
    }


def measure_latency(config: EngineConfig, options: LatencyOptions) -> dict[str, Any]:
    """Seconds that a batch of equal requests takes from start to end, over iterations with other text each."""
    with LLM(**config.flat()) as llm:
        tokenizer = llm.tokenizer
        text = Text(corpus(lambda words: tokenizer.encode(words, add_special_tokens=False)), config.model.seed)
        text.require(options.input_len, "input_len")
        params = SamplingParams(temperature=0.0, max_tokens=options.output_len, ignore_eos=True)

        def once() -> float:
            prompts = [text.window(options.input_len) for _ in range(options.batch_size)]
            began = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - began
            if any(len(output.outputs[0].token_ids) < options.output_len for output in outputs):
                raise ConfigError(
                    f"--input-len {options.input_len} and --output-len {options.output_len} together are more than the "
                    f"{llm.max_model_len} tokens of a context."
                )
            return seconds

        for _ in range(options.num_iters_warmup):
            once()
        latencies = [once() for _ in range(options.num_iters)]
    return {
        "avg_latency": sum(latencies) / len(latencies),
        "latencies": latencies,
        "percentiles": {str(share): percentile(latencies, share) for share in PERCENTILES},
    }


def _warm_up(llm: LLM) -> None:
    llm.generate([[1] * 8], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True), use_tqdm=False)
