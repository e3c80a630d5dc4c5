"""What a claim is: two engines that differ in one setting, figures that both give, and what must hold between them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from jaxserve.bench.workloads import Text, corpus
from jaxserve.config import EngineConfig
from jaxserve.engine import LLM, AsyncLLM
from jaxserve.outputs import RequestOutput
from jaxserve.sampling_params import SamplingParams

__all__ = [
    "Check",
    "Claim",
    "Figure",
    "Figures",
    "Measure",
    "Outcome",
    "Sizes",
    "Ways",
    "decoding",
    "exactly",
    "offline",
    "online",
    "tokens_of",
]

Figures = Mapping[str, float]
Ways = tuple[Mapping[str, Any], Mapping[str, Any]]
"""Settings of the engine: off, on."""

Measure = Callable[[int], Iterator[Figures]]
"""From a seed, which picks the text, to what was measured, part by part."""


@dataclass(frozen=True)
class Sizes:
    """How much work the claims are checked with; lengths in tokens.

    Attributes:
        context: longest context, and so the size of a contiguous region.
        regions: how many such regions the KV memory holds, unless the configuration sizes it.
        mixed: (prompt, output) of each request of the mixed batch.
        seats: sequences that run at once where batching is compared.
        prefix, own, later: a shared prefix, what each request adds to it, and how many come after the first.
        streams, stream: running streams beside long prompts, and (prompt, output) of each.
        long, num_long: (prompt, output) of a long request, and how many come, one after the other.
        chunk: most tokens of a step with chunked prefill, unless the configuration says.
        copied, batches: a text that is to be copied and how much is written of it, in tokens, and how many at once.
        tunes: fine-tunes that have an engine each, or are adapters of one.
    """

    context: int
    regions: int
    mixed: tuple[tuple[int, int], ...]
    seats: int
    prefix: int
    own: int
    later: int
    streams: int
    stream: tuple[int, int]
    long: tuple[int, int]
    num_long: int
    chunk: int
    copied: tuple[int, int]
    batches: tuple[int, ...]
    tunes: int


@dataclass(frozen=True)
class Figure:
    """How a figure is shown."""

    key: str
    unit: str
    more_is_better: bool
    digits: int = 1


@dataclass(frozen=True)
class Check:
    """One thing that must hold, in words with its numbers, and whether it does."""

    text: str
    holds: bool


@dataclass(frozen=True)
class Claim:
    """One entry of the registry.

    Attributes:
        name: what it is called on the command line.
        title: what is compared.
        off, on: names of the two ways, the baseline first.
        settings: the engine's settings of either way, given sizes and a configuration with its longest context.
        session: starts an engine, and gives the function that measures it once.
        figures: what it gives; the first is drawn.
        checks: what must hold between the figures of ``off`` and those of ``on``.
    """

    name: str
    title: str
    off: str
    on: str
    settings: Callable[[Sizes, EngineConfig], Ways]
    session: Callable[[EngineConfig, Sizes], AbstractContextManager[Measure]]
    figures: tuple[Figure, ...]
    checks: Callable[[Figures, Figures], Sequence[Check]]


@dataclass(frozen=True)
class Outcome:
    """What came of a claim: medians and all repeats by way, and the largest share of the machine that others used."""

    claim: Claim
    medians: Mapping[str, Figures]
    repeats: Mapping[str, Sequence[Figures]]
    foreign: float | None

    @property
    def checks(self) -> Sequence[Check]:
        return self.claim.checks(self.medians[self.claim.off], self.medians[self.claim.on])


def exactly(max_tokens: int) -> SamplingParams:
    """Greedy, and neither fewer nor more tokens."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def offline(
    measure: Callable[[LLM, Sizes, Text], Iterator[Figures] | Figures],
) -> Callable[[EngineConfig, Sizes], AbstractContextManager[Measure]]:
    """A session that measures with the offline API, all at once or part by part."""

    @contextmanager
    def session(config: EngineConfig, sizes: Sizes) -> Iterator[Measure]:
        with LLM(**config.flat()) as llm:
            tokens = tokens_of(llm)
            llm.generate([tokens[:8]], exactly(4), use_tqdm=False)

            def parts(seed: int) -> Iterator[Figures]:
                measured = measure(llm, sizes, Text(tokens, seed))
                yield from [measured] if isinstance(measured, Mapping) else measured

            yield parts

    return session


def online(
    measure: Callable[[AsyncLLM, Sizes, Text], Awaitable[Figures]],
) -> Callable[[EngineConfig, Sizes], AbstractContextManager[Measure]]:
    """A session that measures streams, on an event loop of its own."""

    @contextmanager
    def session(config: EngineConfig, sizes: Sizes) -> Iterator[Measure]:
        llm = AsyncLLM.from_config(config)
        with asyncio.Runner() as runner:

            async def warm_up() -> None:
                async for _ in llm.generate(tokens[:8], exactly(4), "warm-up"):
                    pass

            async def once(seed: int) -> Figures:
                return await measure(llm, sizes, Text(tokens, seed))

            try:
                tokens = tokens_of(llm)
                runner.run(warm_up())
                yield lambda seed: iter([runner.run(once(seed))])
            finally:
                runner.run(llm.shutdown())

    return session


def decoding(outputs: Sequence[RequestOutput]) -> tuple[int, float]:
    """Of a batch: tokens after the first ones, and seconds from its first token to its last."""
    first = min(output.metrics.first_token_at for output in outputs)
    seconds = max(output.metrics.finished_at for output in outputs) - first
    return sum(len(output.outputs[0].token_ids) - 1 for output in outputs), seconds


def tokens_of(llm: LLM | AsyncLLM) -> tuple[int, ...]:
    """The corpus as its model reads it."""
    return corpus(lambda text: llm.tokenizer.encode(text, add_special_tokens=False))
