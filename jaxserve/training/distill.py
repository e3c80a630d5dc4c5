"""What the served model writes after each prompt, and its hidden state at every token.

Prompts are taken in groups, and each group becomes a file, so that a run that was stopped begins with the first group
that has none. The hidden states come from the functional decoder with the engine's own weights.

Letters: N texts, M tokens of all texts, E hidden size, T tokens of a forward pass, R sequences in it, S block size.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from tqdm.auto import tqdm

from jaxserve.engine import LLM
from jaxserve.layers import KVCache
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import decode
from jaxserve.models.ragged import ragged_step
from jaxserve.sampling_params import SamplingParams
from jaxserve.training.options import TrainOptions

__all__ = ["Texts", "distill", "read_texts"]

_GROUP = 32  # prompts
_STATES_TOKENS, _STATES_ROWS, _BLOCK = 1024, 32, 16  # T, R and S of the pass that gives hidden states


@dataclass(frozen=True)
class Texts:
    """Texts to learn from, one after the other.

    Attributes:
        tokens: [M] int32.
        hidden: [M, E] bfloat16, the state at each token, which the next one is sampled from.
        lengths: [N] int64, tokens of each text.
        prompts: [N] int64, how many of these are the prompt's.
    """

    tokens: NDArray[np.int32]
    hidden: NDArray[Any]
    lengths: NDArray[np.int64]
    prompts: NDArray[np.int64]

    @property
    def starts(self) -> NDArray[np.int64]:
        """First token of each text, [N]."""
        return np.cumsum(self.lengths) - self.lengths

    def written(self) -> NDArray[np.int32]:
        """The tokens that the model wrote."""
        index = np.arange(len(self.tokens)) - np.repeat(self.starts, self.lengths)
        return self.tokens[index >= np.repeat(self.prompts, self.lengths)]

    def some(self, first: int, last: int) -> Texts:
        """Texts first … last - 1."""
        ends = np.concatenate([[0], np.cumsum(self.lengths)])
        tokens = slice(ends[first], ends[last])
        return Texts(self.tokens[tokens], self.hidden[tokens], self.lengths[first:last], self.prompts[first:last])


def distill(llm: LLM, prompts: Sequence[list[int]], options: TrainOptions, folder: Path, seed: int) -> None:
    """Write one file per group of prompts to ``folder``, but for those that are there."""
    folder.mkdir(parents=True, exist_ok=True)
    states = _Hidden(llm, max(_STATES_TOKENS, options.max_prompt_tokens + options.max_tokens))
    for group in tqdm(range(-(-len(prompts) // _GROUP)), desc="writing", unit="group", disable=None):
        path = folder / f"{group:06d}.npz"
        if path.exists():
            continue
        first = group * _GROUP
        some = prompts[first : first + _GROUP]
        params = [
            SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens, seed=seed + first + i)
            for i in range(len(some))
        ]
        outputs = llm.generate(some, params, use_tqdm=False)
        texts = [[*prompt, *output.outputs[0].token_ids] for prompt, output in zip(some, outputs, strict=True)]
        _write(
            path,
            Texts(
                np.concatenate([np.array(text, np.int32) for text in texts]),
                np.concatenate(list(states(texts))),
                np.array([len(text) for text in texts]),
                np.array([len(prompt) for prompt in some]),
            ),
        )


def read_texts(folder: Path) -> tuple[Texts, Texts]:
    """Nine texts out of ten, and the others (one at least), which come last."""
    files = []
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as file:
            files.append(
                Texts(file["tokens"], file["hidden"].view(ml_dtypes.bfloat16), file["lengths"], file["prompts"])
            )
    parts = ([getattr(texts, name) for texts in files] for name in ("tokens", "hidden", "lengths", "prompts"))
    every = Texts(*map(np.concatenate, parts))
    cut = len(every.lengths) - max(1, len(every.lengths) // 10)
    return every.some(0, cut), every.some(cut, len(every.lengths))


def _write(path: Path, texts: Texts) -> None:
    """Complete or not at all."""
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        np.savez(
            file,
            tokens=texts.tokens,
            hidden=texts.hidden.view(np.uint16),
            lengths=texts.lengths,
            prompts=texts.prompts,
        )
    os.replace(unfinished, path)


class _Hidden:
    """Hidden states after the final norm, of several texts in one pass.

    Args:
        llm: whose model.
        most: T, at least as many as the longest text has.
    """

    def __init__(self, llm: LLM, most: int) -> None:
        runner = llm.engine.runner
        self._params, self._most = runner.params, most
        self._forward: Callable[..., jax.Array] = jax.jit(
            partial(_forward, config=runner.config, backend=runner.shape.backend, dtype=runner.shape.dtype)
        )

    def __call__(self, texts: Sequence[list[int]]) -> Iterator[NDArray[Any]]:
        """Hidden states [tokens, E] bfloat16 of each text."""
        waiting: list[list[int]] = []
        for text in texts:
            if len(waiting) == _STATES_ROWS or sum(map(len, waiting)) + len(text) > self._most:
                yield from self._run(waiting)
                waiting = []
            waiting.append(text)
        if waiting:
            yield from self._run(waiting)

    def _run(self, texts: list[list[int]]) -> Iterator[NDArray[Any]]:
        tokens = np.zeros(self._most, np.int32)
        query_start = np.zeros(_STATES_ROWS + 1, np.int32)
        query_start[1 : len(texts) + 1] = np.cumsum([len(text) for text in texts])
        query_start[len(texts) + 1 :] = query_start[len(texts)]
        tokens[: query_start[-1]] = np.concatenate(texts)
        rows = np.searchsorted(query_start[1:], np.arange(self._most), side="right")
        tables = np.zeros((_STATES_ROWS, -(-self._most // _BLOCK)), np.int32)
        next_block = 1
        for i, text in enumerate(texts):
            count = -(-len(text) // _BLOCK)
            tables[i, :count] = np.arange(next_block, next_block + count)
            next_block += count
        rows = np.minimum(rows, _STATES_ROWS - 1).astype(np.int32)
        hidden = np.asarray(self._forward(self._params, tokens, rows, query_start, tables))
        for i in range(len(texts)):
            yield hidden[query_start[i] : query_start[i + 1]]


def _forward(
    params: dict[str, Any],
    tokens: jax.Array,
    token_rows: jax.Array,
    query_start: jax.Array,
    tables: jax.Array,
    *,
    config: ModelConfig,
    backend: str,
    dtype: jnp.dtype,
) -> jax.Array:
    """Hidden states [T, E] bfloat16 of whole texts, from their first token on."""
    num_rows = tables.shape[0]
    num_blocks = 1 + -(-tokens.shape[0] // _BLOCK) + num_rows
    kv = KVCache.zeros(config.num_layers, (num_blocks, _BLOCK, config.num_kv_heads, config.head_dim), dtype)
    nothing = jnp.zeros(num_rows, jnp.int32)
    step = ragged_step(tokens, token_rows, query_start, nothing, tables, jnp.int32(0), kv, queries=1, has_prefill=True)
    hidden, _ = decode(params, config, step, kv, backend=backend)
    return hidden.astype(jnp.bfloat16)
