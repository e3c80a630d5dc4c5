"""A server under load: requests sent at their times, whatever becomes of the ones before."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from jaxserve.bench.client import Client
from jaxserve.bench.datasets import Sample, TextCodec, make_samples
from jaxserve.bench.options import DatasetOptions, MetricOptions, ServeOptions
from jaxserve.bench.records import Record, summarise
from jaxserve.errors import ConfigError, LoadError

__all__ = ["arrival_times", "load_server", "send"]


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds from the start at which ``count`` requests are sent; the first at once.

    Gaps are gamma distributed with mean ``1 / rate`` and shape ``burstiness``; of an infinite rate they are none.
    """
    if math.isinf(rate):
        return [0.0] * count
    gaps = np.random.default_rng(seed).gamma(burstiness, 1.0 / (rate * burstiness), count - 1)
    return [0.0, *np.cumsum(gaps).tolist()]


async def send(
    client: Client, samples: Sequence[Sample], times: Sequence[float], max_concurrency: int | None
) -> tuple[list[Record], float]:
    """Send every sample at its time; the records in their order, and how many seconds it took."""
    seats: AbstractAsyncContextManager[Any] = asyncio.Semaphore(max_concurrency) if max_concurrency else nullcontext()
    began = time.perf_counter()
    with tqdm(total=len(samples), desc="requests", unit="request", disable=None) as bar:

        async def one(sample: Sample, at: float) -> Record:
            await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
            async with seats:
                record = await client.ask(sample)
            bar.update()
            return record

        records = await asyncio.gather(*[one(sample, at) for sample, at in zip(samples, times, strict=True)])
    return records, time.perf_counter() - began


def load_server(options: ServeOptions, dataset: DatasetOptions, metrics: MetricOptions) -> dict[str, Any]:
    """Load the server, and sum up; ``records`` of the result holds what happened to each request.

    ConfigError: options contradict each other, or a file cannot be used. JaxserveError: the server cannot be reached.
    """
    if dataset.dataset_name == "trace" and not math.isinf(options.request_rate):
        raise ConfigError("--request-rate has no effect with a trace, which has times of its own: see --trace-speedup.")
    return asyncio.run(_load(options, dataset, metrics))


async def _load(options: ServeOptions, dataset: DatasetOptions, metrics: MetricOptions) -> dict[str, Any]:
    async with Client(options) as client:
        model = await client.find_model()

        samples = make_samples(dataset, _tokenizer(options, model), options.seed)
        times = arrival_times(len(samples), options.request_rate, options.burstiness, options.seed)
        times = [at if sample.at is None else sample.at for sample, at in zip(samples, times, strict=True)]
        records, seconds = await send(client, samples, times, options.max_concurrency)
    return {"model_id": model, **summarise(records, seconds, metrics), "records": records}


def _tokenizer(options: ServeOptions, model: str) -> TextCodec:
    # Not before the server has answered: it imports jax, and may fetch files.
    from jaxserve.engine.tokenizers import open_tokenizer

    try:
        return open_tokenizer(options.tokenizer or model)
    except LoadError as error:
        raise ConfigError(f"no tokenizer: {error} Name the model's with --tokenizer.") from None
