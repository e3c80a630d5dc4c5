"""Seeded workloads of real English text, the same for every system that is measured.

    W1  one stream: a prompt of 128 tokens, 128 new ones
    W2  64 requests at once: prompts of 16 to 512 tokens (lognormal, median 96), 16 to 256 new ones (uniform)
    W3  32 requests at once that share a prefix of 1024 tokens and have 32 of their own, 16 new ones each;
        more such prompts, one at a time, for the time to the first token with the prefix cached,
        and prompts of the same length that share nothing, for the time without

The text is CPython's own documentation of its topics. Lengths come from a fixed seed, so that every repeat is the same
amount of work; the seed given picks the text alone, so that the prefix cache does not answer the next repeat.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from jaxserve.weights import resolve

__all__ = ["Job", "SharedPrefix", "Text", "locate", "mixed_batch", "one_stream", "shared_prefix"]

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


class Text:
    """Random windows of the corpus as token ids."""

    def __init__(self, encode: Callable[[str], list[int]], seed: int) -> None:
        from pydoc_data.topics import topics

        self._tokens = tuple(encode("\n\n".join(topics[name] for name in sorted(topics))))
        self._random = random.Random(f"text {seed}")

    def window(self, size: int) -> tuple[int, ...]:
        """``size`` successive tokens from a random place."""
        start = self._random.randrange(len(self._tokens) - size)
        return self._tokens[start : start + size]


def one_stream(text: Text) -> Job:
    """W1."""
    return Job(text.window(128), 128)


def mixed_batch(text: Text, count: int = 64) -> tuple[Job, ...]:
    """W2, or its first ``count`` requests."""
    lengths = random.Random(f"lengths {LENGTHS_SEED}")
    sizes = [
        (min(512, max(16, round(lengths.lognormvariate(math.log(96), 0.9)))), lengths.randint(16, 256))
        for _ in range(64)
    ]
    return tuple(Job(text.window(prompt), output) for prompt, output in sizes[:count])


def shared_prefix(text: Text, count: int = 32) -> SharedPrefix:
    """W3, or a smaller one with a burst of ``count``."""
    prefix = text.window(1024)
    return SharedPrefix(
        burst=tuple(Job(prefix + text.window(32), 16) for _ in range(count)),
        warm=tuple(Job(prefix + text.window(32), 16) for _ in range(min(count, 8))),
        cold=tuple(Job(text.window(1056), 16) for _ in range(min(count, 4))),
    )


def locate(model: str) -> dict[str, str]:
    """Arguments of transformers' ``from_pretrained`` for a model named as for jaxserve."""
    files = resolve(model)
    if files.gguf is not None:
        return {"pretrained_model_name_or_path": str(files.gguf.parent), "gguf_file": files.gguf.name}
    return {"pretrained_model_name_or_path": str(files.folder)}
