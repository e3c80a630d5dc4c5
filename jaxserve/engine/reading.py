"""What is made of prompts that are only read: embeddings, and scores of pairs of texts.

Any decoder can do both. An embedding is a hidden state behind the final norm: that of the prompt's last token, or the
mean over all tokens. The score of a pair is the mean log probability of the second text's tokens after the first: 0 is
certain, and what is less likely is lower, whatever the second text's length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from jaxserve.errors import RequestError
from jaxserve.outputs import RequestOutput
from jaxserve.sampling_params import SamplingParams

__all__ = ["EMBEDDING", "POOLINGS", "SCORING", "check_dimensions", "joined", "mean_logprob", "pairs", "shaped"]

POOLINGS = ("last", "mean")

EMBEDDING = SamplingParams(temperature=0.0, max_tokens=1)
"""Parameters of a request for an embedding."""

SCORING = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0)
"""Parameters of a request for a score."""


class Encodes(Protocol):
    """What is asked of a tokenizer."""

    @property
    def longest_token(self) -> int: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


def check_dimensions(dimensions: int | None, hidden_size: int) -> None:
    """RequestError if an embedding cannot have so many numbers."""
    if dimensions is not None and not 1 <= dimensions <= hidden_size:
        raise RequestError(
            f"dimensions must be from 1 to {hidden_size}, the size of the model's hidden states.", "dimensions"
        )


def shaped(output: RequestOutput, dimensions: int | None, *, normalize: bool) -> NDArray[np.float32]:
    """The embedding of a finished output: its first ``dimensions`` numbers, brought to the length 1."""
    assert output.embedding is not None, "the request had a pooling"
    embedding = output.embedding[:dimensions].astype(np.float64)
    length = np.linalg.norm(embedding)
    return (embedding / length if normalize and length > 0 else embedding).astype(np.float32)


def pairs(first: str | Sequence[str], second: str | Sequence[str]) -> list[tuple[str, str]]:
    """Texts by pairs: one with each of many, or each with its own. RequestError: their numbers do not fit."""
    firsts, seconds = ([text] if isinstance(text, str) else list(text) for text in (first, second))
    if len(firsts) == 1:
        firsts *= len(seconds)
    if len(firsts) != len(seconds) or not seconds:
        raise RequestError(f"{len(firsts)} texts cannot be paired with {len(seconds)}: give one, or as many.", "text_2")
    return list(zip(firsts, seconds, strict=True))


def joined(tokenizer: Encodes, pair: tuple[str, str], max_tokens: int) -> tuple[list[int], int]:
    """Token ids of a pair, and how many of them are the first text's.

    RequestError: one has no token, or they are so long that ``max_tokens`` tokens cannot hold them.
    """
    first, second = pair
    if (length := len(first) + len(second)) > (limit := max_tokens * tokenizer.longest_token):
        raise RequestError(
            f"a pair of texts has {length} characters; {limit} is the most that {max_tokens} tokens can hold.",
            "text_2",
        )
    before = tokenizer.encode(first)
    after = tokenizer.encode(second, add_special_tokens=False)
    if not before or not after:
        raise RequestError(
            "a pair of texts to score must have a token in each of the two.", "text_2" if before else "text_1"
        )
    return [*before, *after], len(before)


def mean_logprob(output: RequestOutput, num_first: int) -> float:
    """The score of a finished output whose first text has ``num_first`` tokens."""
    assert output.prompt_logprobs is not None, "the request asked for them"
    ids, shown = output.prompt_token_ids[num_first:], output.prompt_logprobs[num_first:]
    return float(np.mean([entries[token].logprob for token, entries in zip(ids, shown, strict=True) if entries]))
