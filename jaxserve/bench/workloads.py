"""Seeded workloads of real English text, the same for every system that is measured.

    W1  one stream: a prompt of 128 tokens, 128 new ones
    W2  64 requests at once: prompts of 16 to 512 tokens (lognormal, median 96), 16 to 256 new ones (uniform)
    W3  32 requests at once that share a prefix of 1024 tokens and have 32 of their own, 16 new ones each;
        more such prompts, one at a time, for the time to the first token with the prefix cached,
        and prompts of the same length that share nothing, for the time without
    W4  requests like those of W2 that arrive at random (Poisson), and every few seconds a prompt of 2000 tokens

The text is CPython's own documentation of its topics. Lengths come from a fixed seed, so that every repeat is the same
amount of work; the seed given picks the text alone, so that the prefix cache does not answer the next repeat.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from jaxserve.errors import ConfigError

__all__ = [
    "Arrival",
    "Job",
    "SharedPrefix",
    "Text",
    "corpus",
    "mixed_batch",
    "mixed_lengths",
    "one_stream",
    "shared_prefix",
    "stream_of_chats",
]

LENGTHS_SEED = 7


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt as token ids, and how many tokens to generate, neither more nor fewer."""

    prompt: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """W3: ``burst`` at once; ``warm`` one at a time, same prefix; ``cold`` one at a time, nothing in common."""

    burst: tuple[Job, ...]
    warm: tuple[Job, ...]
    cold: tuple[Job, ...]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of W4, sent ``at`` seconds after the start; ``is_long`` for the long prompts among the chats."""

    at: float
    job: Job
    is_long: bool


def corpus(encode: Callable[[str], list[int]]) -> tuple[int, ...]:
    """All the text as token ids; ``encode`` should add no special tokens."""
    from pydoc_data.topics import topics

    return tuple(encode("\n\n".join(topics[name] for name in sorted(topics))))


class Text:
    """Windows of a corpus of token ids, at random places that ``seed`` decides."""

    def __init__(self, tokens: Sequence[int], seed: int) -> None:
        self._tokens = tokens
        self._seed = seed
        self._random = random.Random(f"text {seed}")

    def of_other(self, tokens: Sequence[int]) -> Text:
        """Windows of another corpus, by the same seed."""
        return Text(tokens, self._seed)

    @property
    def longest(self) -> int:
        """Most tokens of a window."""
        return len(self._tokens) - 1

    def require(self, size: int, setting: str) -> None:
        """ConfigError: a window of ``size`` tokens, as ``setting`` asks for, is more than there is."""
        if size > self.longest:
            raise ConfigError(f"{setting} must be at most {self.longest}, got {size}: the text ends there.", setting)

    def window(self, size: int) -> tuple[int, ...]:
        """``size`` successive tokens from another place each time. ConfigError: the corpus is shorter."""
        return self._cut(size, self._random)

    def named(self, name: int, size: int) -> tuple[int, ...]:
        """``size`` successive tokens, the same ones whenever ``name`` is the same."""
        return self._cut(size, random.Random(f"text {self._seed} {name}"))

    def _cut(self, size: int, source: random.Random) -> tuple[int, ...]:
        if size > self.longest:
            raise ConfigError(f"a prompt of {size} tokens is too long: the text has {len(self._tokens)}.")
        start = source.randrange(len(self._tokens) - size)
        return tuple(self._tokens[start : start + size])


def one_stream(text: Text) -> Job:
    """W1."""
    return Job(text.window(128), 128)


def mixed_lengths() -> Iterator[tuple[int, int]]:
    """Lengths of prompts and outputs of W2, and endlessly on."""
    lengths = random.Random(f"lengths {LENGTHS_SEED}")
    while True:
        yield min(512, max(16, round(lengths.lognormvariate(math.log(96), 0.9)))), lengths.randint(16, 256)


def mixed_batch(text: Text, count: int = 64) -> tuple[Job, ...]:
    """W2, or its first ``count`` requests."""
    return tuple(Job(text.window(prompt), output) for prompt, output in islice(mixed_lengths(), count))


def shared_prefix(text: Text, count: int = 32) -> SharedPrefix:
    """W3, or a smaller one with a burst of ``count``."""
    prefix = text.window(1024)
    return SharedPrefix(
        burst=tuple(Job(prefix + text.window(32), 16) for _ in range(count)),
        warm=tuple(Job(prefix + text.window(32), 16) for _ in range(min(count, 8))),
        cold=tuple(Job(text.window(1056), 16) for _ in range(min(count, 4))),
    )


def stream_of_chats(text: Text, seconds: float, rate: float = 0.4, long_every: float = 5.0) -> tuple[Arrival, ...]:
    """W4: chats at ``rate`` per second, and a long prompt in the middle of every ``long_every`` seconds, by time."""
    gaps = random.Random(f"arrivals {LENGTHS_SEED}")
    arrivals = []
    at = gaps.expovariate(rate)
    for prompt, output in mixed_lengths():
        if at >= seconds:
            break
        arrivals.append(Arrival(at, Job(text.window(prompt), output), is_long=False))
        at += gaps.expovariate(rate)
    for i in range(int(seconds / long_every)):
        arrivals.append(Arrival((i + 0.5) * long_every, Job(text.window(2000), 16), is_long=True))
    return tuple(sorted(arrivals, key=lambda arrival: arrival.at))
