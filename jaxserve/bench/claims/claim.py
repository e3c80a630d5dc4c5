"""What a claim is: two ways to do the same work, figures that both give, and what must hold between them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from jaxserve.bench.machine import CpuMeter
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
    "InTurns",
    "Measure",
    "OneByOne",
    "Outcome",
    "Procedure",
    "Sizes",
    "Ways",
    "decoding",
    "engines",
    "exactly",
    "offline",
    "online",
    "open_engine",
    "open_streams",
]

Figures = Mapping[str, float]
Ways = tuple[Mapping[str, Any], Mapping[str, Any]]
"""Settings of the engine: off, on."""

Measure = Callable[[int], "Figures | Iterator[Figures]"]
"""From a seed, which picks the text, to what was measured: at once, or part by part."""

Session = Callable[[EngineConfig, "Sizes"], AbstractContextManager[Measure]]
"""Starts an engine, and gives the function that measures it once."""


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


class Procedure(Protocol):
    """How both ways of a claim are measured."""

    def run(
        self, ways: tuple[str, str], config: EngineConfig, sizes: Sizes, repeats: int, tell: Callable[[str], None]
    ) -> Iterator[tuple[str, Figures, float | None]]:
        """Each way ``repeats`` times: its name, what was measured, and the share of the machine that others used."""
        ...


@dataclass(frozen=True)
class OneByOne:
    """One engine after the other: for what depends on how much memory there is, and differs by more than a few percent.

    Attributes:
        settings: the engine's settings of either way, given sizes and a configuration with its longest context.
        session: starts an engine, and gives the function that measures it once.
    """

    settings: Callable[[Sizes, EngineConfig], Ways]
    session: Session

    def run(
        self, ways: tuple[str, str], config: EngineConfig, sizes: Sizes, repeats: int, tell: Callable[[str], None]
    ) -> Iterator[tuple[str, Figures, float | None]]:
        """See ``Procedure``."""
        for way, settings in zip(ways, self.settings(sizes, config), strict=True):
            tell(f"starting an engine ({way})")
            with self.session(EngineConfig.from_flat({**config.flat(), **settings}), sizes) as measure:
                for repeat in range(repeats):
                    tell(f"{way}, run {repeat + 1} of {repeats}")
                    yield way, *_metered(measure, config.model.seed + repeat)


@dataclass(frozen=True)
class InTurns:
    """Both ways in turns, in one process: machines drift by more than the few percent that are asked about.

    Attributes:
        both: starts what is needed, and gives the functions that measure either way once.
        warms_up: whether a first turn does not count.
    """

    both: Callable[[EngineConfig, Sizes], AbstractContextManager[Sequence[Measure]]]
    warms_up: bool = True

    def run(
        self, ways: tuple[str, str], config: EngineConfig, sizes: Sizes, repeats: int, tell: Callable[[str], None]
    ) -> Iterator[tuple[str, Figures, float | None]]:
        """See ``Procedure``. Turns are as short as parts are, and who comes first changes from one run to the next."""
        tell("starting what is compared")
        with self.both(config, sizes) as measures:
            order = list(zip(ways, measures, strict=True))
            if self.warms_up:
                for _, measure in order:
                    _whole(measure(config.model.seed + repeats))
            for repeat in range(repeats):
                tell(f"run {repeat + 1} of {repeats}")
                order.reverse()
                with CpuMeter() as meter:
                    parts = [_parts(measure(config.model.seed + repeat)) for _, measure in order]
                    figures = [_whole(iter(way)) for way in zip(*zip(*parts, strict=True), strict=True)]
                for (way, _), measured in zip(order, figures, strict=True):
                    yield way, measured, meter.foreign


def engines(
    settings: Callable[[Sizes, EngineConfig], Ways], session: Session
) -> Callable[[EngineConfig, Sizes], AbstractContextManager[Sequence[Measure]]]:
    """For ``InTurns``: an engine for each of two settings, both started before anything is measured."""

    @contextmanager
    def both(config: EngineConfig, sizes: Sizes) -> Iterator[Sequence[Measure]]:
        with ExitStack() as stack:
            flats = [{**config.flat(), **some} for some in settings(sizes, config)]
            yield [stack.enter_context(session(EngineConfig.from_flat(flat), sizes)) for flat in flats]

    return both


def _metered(measure: Measure, seed: int) -> tuple[Figures, float | None]:
    with CpuMeter() as meter:
        figures = _whole(measure(seed))
    return figures, meter.foreign


def _parts(measured: Figures | Iterator[Figures]) -> Iterator[Figures]:
    return iter([measured]) if isinstance(measured, Mapping) else measured


def _whole(measured: Figures | Iterator[Figures]) -> Figures:
    return {key: value for part in _parts(measured) for key, value in part.items()}


@dataclass(frozen=True)
class Claim:
    """One entry of the registry.

    Attributes:
        name: what it is called on the command line.
        title: what is compared.
        off, on: names of the two ways, the baseline first.
        procedure: how both ways are measured.
        figures: what it gives; the first is drawn.
        checks: what must hold between the figures of ``off`` and those of ``on``.
    """

    name: str
    title: str
    off: str
    on: str
    procedure: Procedure
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


@contextmanager
def open_engine(config: EngineConfig) -> Iterator[tuple[LLM, Sequence[int]]]:
    """An engine that has run, and the text as its model reads it."""
    with LLM(**config.flat()) as llm:
        tokens = _tokens(llm)
        llm.generate([tokens[:8]], exactly(4), use_tqdm=False)
        yield llm, tokens


@contextmanager
def open_streams(config: EngineConfig) -> Iterator[tuple[AsyncLLM, Sequence[int], asyncio.Runner]]:
    """The same for streams, with an event loop of its own."""
    llm = AsyncLLM.from_config(config)
    with asyncio.Runner() as runner:

        async def warm_up() -> None:
            async for _ in llm.generate(tokens[:8], exactly(4), "warm-up"):
                pass

        try:
            tokens = list(_tokens(llm))
            runner.run(warm_up())
            yield llm, tokens, runner
        finally:
            runner.run(llm.shutdown())


def offline(measure: Callable[[LLM, Sizes, Text], Figures | Iterator[Figures]]) -> Session:
    """A session that measures with the offline API."""

    @contextmanager
    def session(config: EngineConfig, sizes: Sizes) -> Iterator[Measure]:
        with open_engine(config) as (llm, tokens):
            yield lambda seed: measure(llm, sizes, Text(tokens, seed))

    return session


def online(measure: Callable[[AsyncLLM, Sizes, Text], Coroutine[Any, Any, Figures]]) -> Session:
    """A session that measures streams."""

    @contextmanager
    def session(config: EngineConfig, sizes: Sizes) -> Iterator[Measure]:
        with open_streams(config) as (llm, tokens, runner):
            yield lambda seed: runner.run(measure(llm, sizes, Text(tokens, seed)))

    return session


def decoding(outputs: Sequence[RequestOutput]) -> tuple[int, float]:
    """Of a batch: tokens after the first ones, and seconds from its first token to its last."""
    first = min(output.metrics.first_token_at for output in outputs)
    seconds = max(output.metrics.finished_at for output in outputs) - first
    return sum(len(output.outputs[0].token_ids) - 1 for output in outputs), seconds


def _tokens(llm: LLM | AsyncLLM) -> tuple[int, ...]:
    """The corpus as its model reads it."""
    return corpus(lambda text: llm.tokenizer.encode(text, add_special_tokens=False))
